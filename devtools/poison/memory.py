# SPDX-License-Identifier: Apache-2.0
"""What a paged KV cache holds, slot by slot, by name: of which prefix it is the right content, or that it is wrong."""

from collections.abc import Sequence

POISON = -1
EMPTY = 0
"""The prefix of no tokens."""
_STATE = -1


class Prefixes:
    """A number for each sequence of tokens; equal sequences have equal numbers."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}

    def extend(self, prefix: int, token: int) -> int:
        return self._children.setdefault((prefix, token), len(self._children) + 1)

    def chain(self, tokens: Sequence[int]) -> list[int]:
        """The numbers of all prefixes: item ``i`` is that of the first ``i`` tokens."""
        chain = [EMPTY]
        for token in tokens:
            chain.append(self.extend(chain[-1], token))
        return chain


class Memory:
    """The physical blocks, by id. A block holds slots of attention or one state; what is written last counts."""

    def __init__(self) -> None:
        self._blocks: dict[int, dict[int, int]] = {}

    def clear(self, block: int) -> None:
        self._blocks.pop(block, None)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, all read before the first is written."""
        contents = [dict(self._blocks.get(source, {})) for source, _ in pairs]
        for (_, target), content in zip(pairs, contents, strict=True):
            self._blocks[target] = content

    def slot(self, block: int, offset: int) -> int:
        """Of which prefix the key and value at ``offset`` are; ``POISON`` where nobody wrote them."""
        return self._blocks.get(block, {}).get(offset, POISON)

    def write_slot(self, block: int, offset: int, prefix: int) -> None:
        content = self._blocks.setdefault(block, {})
        content.pop(_STATE, None)
        content[offset] = prefix

    def state(self, block: int) -> int:
        return self.slot(block, _STATE)

    def write_state(self, block: int, prefix: int) -> None:
        self._blocks[block] = {_STATE: prefix}
