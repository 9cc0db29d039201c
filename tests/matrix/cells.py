# SPDX-License-Identifier: Apache-2.0
"""The columns of the matrix and what one cell says."""

from dataclasses import dataclass
from enum import StrEnum


class Column(StrEnum):
    """What is asked of each model, in the order of the table."""

    DEVICE = "device"
    """The same prompt again: vLLM's own cache, with our connectors beside it."""
    CPU = "CPU tier"
    """The device cache is emptied, the same prompt again."""
    SUB_BLOCK = "sub-block"
    """A prompt shorter than a block."""
    EXTENSION = "extension"
    """A prompt and more text after it."""
    SHARED_PREFIX = "shared prefix"
    """The third of three prompts that begin with the same text."""
    DISK = "disk tier, restarted"
    """Another engine on the same root: the same prompt, and an extension of it."""
    WRONG_BYTES = "wrong bytes seen"
    """Zeros in place of one object of each kind change the answer: the other columns could have failed."""
    TWO_RANKS = "TP 2"
    """Two ranks: the CPU tier, then, restarted, the disk tier."""


class Verdict(StrEnum):
    """How an answer compares, tokens and logprobs."""

    EXACT = "exact"
    """Equal to that of an engine without any cache."""
    AS_DEVICE = "as device cache"
    """Not exact, but equal to that of vLLM's own device cache with as many tokens and without a connector; where that
    finds fewer, to one computed in steps that end there."""
    WRONG = "wrong"
    NO_HIT = "no hit"
    """Fewer tokens were restored than can be."""
    UNSEEN = "unseen"
    """Wrong bytes did not change the answer."""
    NOT_RUN = "not run"


_WORST_FIRST = (Verdict.WRONG, Verdict.UNSEEN, Verdict.NO_HIT, Verdict.NOT_RUN, Verdict.AS_DEVICE, Verdict.EXACT)


@dataclass(frozen=True, slots=True)
class Cell:
    """``note`` says why, wherever the verdict is not the best."""

    verdict: Verdict
    note: str = ""

    @property
    def is_good(self) -> bool:
        return self.verdict in (Verdict.EXACT, Verdict.AS_DEVICE)


def worst(cells: list[Cell]) -> Cell:
    """Of several answers that stand in one cell."""
    return min(cells, key=lambda cell: _WORST_FIRST.index(cell.verdict))
