# SPDX-License-Identifier: Apache-2.0
"""One layer's pages, moved whole: states, and attention whose pages cannot be cut."""

import torch

from vllm_overlay.transfer.object_stream import ObjectStream


class WholePages:
    """The pages of one layer in host memory, as the CPU transfer moves them.

    A page is moved byte by byte in nominal order. Padding between pages, or inside one, is left out.
    """

    def __init__(self, layer: torch.Tensor) -> None:
        """``layer``: dimension 0 counts vLLM's blocks; any strides."""
        self._layer = layer
        self._num_blocks = layer.shape[0]
        self._is_contiguous = layer[:1].is_contiguous()
        self._address = layer.data_ptr()
        self._step = layer.stride(0) * layer.element_size()
        self._page_bytes = layer[:1].numel() * layer.element_size()

    def gather(self, block_id: int, stream: ObjectStream) -> None:
        """Copies a block's page to where the stream is. Raises IndexError when there is no such block."""
        self._check(block_id)
        if self._is_contiguous:
            stream.write(self._address + block_id * self._step, self._page_bytes)
        else:
            page = self._layer[block_id].contiguous()
            stream.write(page.data_ptr(), self._page_bytes)

    def scatter(self, block_id: int, stream: ObjectStream) -> None:
        """Copies a block's page from where the stream is. Raises IndexError when there is no such block."""
        self._check(block_id)
        if self._is_contiguous:
            stream.read(self._address + block_id * self._step, self._page_bytes)
        else:
            page = torch.empty(self._layer.shape[1:], dtype=self._layer.dtype)
            stream.read(page.data_ptr(), self._page_bytes)
            self._layer[block_id].copy_(page)

    def _check(self, block_id: int) -> None:
        """A compiled copy would go on beyond the layer's end."""
        if not 0 <= block_id < self._num_blocks:
            raise IndexError(f"block {block_id} is not among the layer's {self._num_blocks}")
