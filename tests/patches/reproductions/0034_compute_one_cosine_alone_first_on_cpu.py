# SPDX-License-Identifier: Apache-2.0
"""Which cosines an engine's process computes first: those of a table, with several threads, or one alone.

What several threads get wrong is seen once in hundreds of starts, so it is not waited for.
"""

import torch

from tests.patches.lab import Lab, conclude

SYMPTOM = "the process's first cosines are those of the rotary table, which two threads compute at once"


def main() -> None:
    sizes: list[int] = []
    cos = torch.Tensor.cos

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return cos(tensor)

    torch.Tensor.cos = seen  # type: ignore[method-assign, assignment]
    Lab()
    is_alone, has_table = sizes[0] == 1, max(sizes) > 2048  # torch gives a thread so many
    conclude(has_table and not is_alone, has_table and is_alone, sizes=sizes)


if __name__ == "__main__":
    main()
