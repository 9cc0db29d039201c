# SPDX-License-Identifier: Apache-2.0
"""Names that cover the tokens which a drafter has read ahead of an object's own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LookaheadKeys(Sequence[bytes]):
    """A request's block hashes, each ``num_units`` match units further on than what it names; so many fewer.

    A drafter's keys and values of a token depend on the next token too. Prompts that part right behind an object have
    other bytes there, and so other names.
    """

    def __init__(self, block_hashes: Sequence[bytes], num_units: int) -> None:
        self._block_hashes = block_hashes
        self._num_units = num_units

    def __len__(self) -> int:
        return max(0, len(self._block_hashes) - self._num_units)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        places = range(self._num_units, self._num_units + len(self))[index]
        if isinstance(places, range):
            return [self._block_hashes[place] for place in places]
        return self._block_hashes[places]


def lookahead_units(vllm_config: "VllmConfig", match_unit: int) -> int:
    """Match units that vLLM drops from the end of each hit, because a drafter reads ahead. 0 without one that does."""
    config = vllm_config.speculative_config
    if config is None or not config.use_eagle_block_drop():
        return 0
    return -(-int(vllm_config.num_prefill_lookahead_tokens) // match_unit)
