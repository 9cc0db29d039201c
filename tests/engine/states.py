# SPDX-License-Identifier: Apache-2.0
"""The dtypes that vLLM keeps recurrent states in, and the blocks of the tiny model that go with each.

Left alone, vLLM chooses by the processor: float32 on one with AVX-512 BF16, where its GDN kernels are accelerated, the
model's own dtype elsewhere. A test that means one of them, or counts in blocks, says so and gets it on every machine.
"""

from dataclasses import dataclass
from typing import Any

NUM_LINEAR_LAYERS = 3
CONVOLUTION_BYTES = (2 * 2 * 128 + 4 * 128) * (4 - 1) * 2
"""A layer's last three inputs of queries, keys (2 heads each) and values (4), of 128 dimensions each, in bfloat16."""
STATE_ELEMENTS = 4 * 128 * 128
TOKEN_BYTES = 2 * 2 * 32 * 2
"""Keys and values of one token: 2 heads of 32 dimensions in bfloat16, in the one layer of full attention."""


@dataclass(frozen=True, slots=True)
class States:
    """``block_size`` is the unified block size N in tokens: the one that vLLM finds for the tiny model on a CPU."""

    dtype: str
    element_bytes: int
    block_size: int

    def __str__(self) -> str:
        return self.dtype

    @property
    def arguments(self) -> dict[str, Any]:
        """Of ``vllm.LLM``."""
        return {"mamba_ssm_cache_dtype": self.dtype, "block_size": self.block_size}

    @property
    def flags(self) -> list[str]:
        """Of vLLM's server."""
        return ["--mamba-ssm-cache-dtype", self.dtype, "--block-size", str(self.block_size)]

    @property
    def num_bytes(self) -> int:
        """Of the states in a snapshot, all layers together: worked out by hand from tools/tiny_model.py."""
        return NUM_LINEAR_LAYERS * (CONVOLUTION_BYTES + STATE_ELEMENTS * self.element_bytes)


FLOAT32 = States("float32", 4, 1152)
BFLOAT16 = States("bfloat16", 2, 640)
STATES = (FLOAT32, BFLOAT16)
