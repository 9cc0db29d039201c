# SPDX-License-Identifier: Apache-2.0
"""What makes a random Mamba model remember: shared by the families here that have such layers."""


def decay_slowly(model) -> None:
    """Changes weights in place: a state keeps 99.9 % of itself from one token to the next."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-7.0)
            elif name.endswith(("dt_bias", "dt_proj.bias")):
                parameter.zero_()
