# SPDX-License-Identifier: Apache-2.0
"""What a transfer is built from: the registered tensors of one KV cache group."""

from dataclasses import dataclass

import torch

from vllm_overlay.transfer.page_map import PageMap


@dataclass(frozen=True, slots=True)
class GroupTensors:
    """The registered tensors of one KV cache group, one a layer, and the map of their pages (None: moved whole).

    Dimension 0 counts vLLM's blocks. An attention layer is (blocks, heads, tokens a block, content), with any strides.
    Where its backend works on smaller blocks it is (blocks, kernel blocks, heads, tokens a kernel block, content).
    """

    layers: tuple[torch.Tensor, ...]
    page_map: PageMap | None = None

    @property
    def num_blocks(self) -> int:
        return int(self.layers[0].shape[0])

    @property
    def block_size(self) -> int:
        """Tokens a block; for a group that can be cut."""
        layer = self.layers[0]
        return int(layer.shape[-2] * (layer.shape[1] if layer.dim() == 5 else 1))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers, all that the group keeps of it; for a group that can be cut."""
        return sum(layer.shape[-3] * layer.shape[-1] * layer.element_size() for layer in self.layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block's pages, all layers."""
        return sum(layer[0].numel() * layer.element_size() for layer in self.layers)
