# SPDX-License-Identifier: Apache-2.0
"""One object of a tier's index: its name, its bytes, its state, and what it hangs on."""

from enum import Enum, auto

import msgspec
from msgspec import Struct

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


RESERVED, STORED, COMMITTED, DROPPED = EntryState
"""For the index, which asks all the time: an attribute of an enumeration takes several times as long as a name."""


class Entry(msgspec.Struct, eq=False, gc=False):
    """One object of the index. Callers read it. Only the index changes it.

    The garbage collector passes by, because it would stop the scheduler for a walk over all entries. So objects that
    refer to each other in a circle are freed only where the index takes them apart: when an object goes.
    """

    object_id: ObjectId
    num_bytes: int
    end_tokens: int
    ticket: int
    """Its store's. Zero or less: another process has stored it, or an earlier life of this engine."""
    units: tuple[int, ...]
    last_use: int
    parents: "tuple[Entry, ...]"
    children: "dict[Entry, None]" = {}
    """A set in the order of insertion: the garbage collector passes by a dictionary, but not by a set."""
    state: EntryState = EntryState.RESERVED
    pins: int = 0
    num_snapshots: int = 0
    """Committed snapshots right below this chunk."""
    jump: "Entry | None" = None
    """A chunk above on the same chain, with no chunk in between that has snapshots. None: no chunk above has any."""
    unit: "Struct | None" = None
    """What the eviction policy keeps of it, if it keeps anything. Objects of one unit that hang one on the other go one
    after the other."""

    def __repr__(self) -> str:
        return f"Entry({self.object_id}, {self.state.name}, {self.num_bytes} bytes, ticket {self.ticket})"
