# SPDX-License-Identifier: Apache-2.0
"""One object of a tier's index: its name, its bytes, its state, and what it hangs on."""

from dataclasses import dataclass, field
from enum import Enum, auto

from vllm_overlay.planner.objects import ObjectId


class EntryState(Enum):
    RESERVED = auto()
    """A ticket is out: the ranks are writing it."""
    STORED = auto()
    """The bytes are there, but a parent is not committed yet."""
    COMMITTED = auto()
    """Visible: it can be found and loaded."""
    DROPPED = auto()
    """Invisible for good; in the index only for as long as a ticket or a pin holds its bytes."""


@dataclass(slots=True, eq=False)
class Entry:
    """One object of the index. Callers read it; only the index changes it."""

    object_id: ObjectId
    num_bytes: int
    end_tokens: int
    ticket: int
    units: tuple[int, ...]
    last_use: int
    parents: "tuple[Entry, ...]" = field(repr=False)
    children: "set[Entry]" = field(default_factory=set, repr=False)
    state: EntryState = EntryState.RESERVED
    pins: int = 0
    num_snapshots: int = 0
    """Committed snapshots right below this chunk."""
    jump: "Entry | None" = field(default=None, repr=False)
    """A chunk above on the same chain, such that none in between has snapshots; None: none above has."""
