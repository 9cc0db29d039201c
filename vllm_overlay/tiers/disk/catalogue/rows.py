# SPDX-License-Identifier: Apache-2.0
"""What goes in and comes out, with the bounds that both must keep."""

import functools
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from vllm_overlay.planner.objects import TAG_PATTERN, ObjectId, PlannedObject
from vllm_overlay.tiers.disk.catalogue.errors import Damaged

MAX_PARENTS = 8
NUM_SLOTS = 256
MAX_ID = 2**62
MAX_BYTES = 2**53
MAX_TOKENS = 2**40
MAX_SECONDS = 2**40
MAX_SCORE = 1e15
MAX_RANKS = 10_000
MAX_KEY_BYTES = 64

Id = Annotated[int, Meta(ge=1, le=MAX_ID)]
Slot = Annotated[int, Meta(ge=0, lt=NUM_SLOTS)]
NumBytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
ObjectBytes = Annotated[int, Meta(ge=1, le=MAX_BYTES)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Ticket = Annotated[int, Meta(ge=0, le=MAX_ID)]
Seconds = Annotated[int, Meta(ge=0, le=MAX_SECONDS)]
Score = Annotated[float, Meta(ge=-MAX_SCORE, le=MAX_SCORE)]
WorldSize = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Pid = Annotated[int, Meta(ge=1, le=2**31)]
Position = Annotated[int, Meta(ge=0, lt=MAX_PARENTS)]
Flag = Annotated[int, Meta(ge=0, le=1)]
Fingerprint = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Tag = Annotated[str, Meta(pattern=rf"\A(?:{TAG_PATTERN})\Z", max_length=8)]
Key = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Row = TypeVar("Row")


class Namespace(msgspec.Struct, frozen=True):
    """What a process serves. ``partner`` is the namespace in which the parents of its objects lie: a snapshot's are in
    the attention namespace, a chunk's in its own.

    ``is_temporary`` says that nobody will serve it again once its process ends.
    """

    fingerprint: Fingerprint
    partner: Fingerprint
    is_temporary: bool = False


class Name(msgspec.Struct, frozen=True, order=True, gc=False):
    """One object of a root."""

    fingerprint: str
    object_id: ObjectId


class StoredObject(msgspec.Struct, frozen=True, gc=False):
    """One object. ``num_bytes`` is what all ranks' files take; ``planned.num_bytes`` is one rank's payload.

    ``last_use`` is in seconds since the epoch. ``planned.group_id`` is not kept.
    """

    fingerprint: str
    planned: PlannedObject
    world_size: int
    num_bytes: int
    ticket: int
    last_use: int

    @property
    def name(self) -> Name:
        return Name(self.fingerprint, self.planned.object_id)


class Scored(msgspec.Struct, frozen=True, gc=False):
    """What a member thinks of an object: evict it as if it had last been used at ``score``.

    The member knows its uses up to ``until``: of an object that somebody has used later it knows too little.
    """

    name: Name
    score: float
    until: float


class RemovedObject(msgspec.Struct, frozen=True, gc=False):
    """An object whose files are to be unlinked: one a rank, of ``num_bytes`` together."""

    name: Name
    world_size: int
    num_bytes: int


class ObjectRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A row of ``object``, in the order of ``COLUMNS``."""

    id: Id
    namespace: Id
    tag: Tag
    key: Key
    world_size: WorldSize
    num_bytes: ObjectBytes
    payload_bytes: ObjectBytes
    start_tokens: Tokens
    end_tokens: Tokens
    ticket: Ticket
    last_use: Seconds

    @property
    def object_id(self) -> ObjectId:
        return ObjectId(self.tag, self.key)

    def stored(self, fingerprint: str, parents: tuple[ObjectId, ...]) -> StoredObject:
        """The object of this row."""
        planned = PlannedObject(self.object_id, parents, self.start_tokens, self.end_tokens, self.payload_bytes)
        return StoredObject(fingerprint, planned, self.world_size, self.num_bytes, self.ticket, self.last_use)


COLUMNS = "id, namespace, tag, key, world_size, num_bytes, payload_bytes, start_tokens, end_tokens, ticket, last_use"


class MetaRow(msgspec.Struct, array_like=True, frozen=True):
    """The one row of ``meta``."""

    is_complete: Flag
    rebuilder: Slot | None
    object_bytes: NumBytes
    num_objects: NumBytes


def read_all(kind: type[Row], rows: Iterable[Any]) -> list[Row]:
    """Rows of the file as ``kind``; raises msgspec.ValidationError, which a transaction turns into Damaged."""
    of_one: Any = kind
    found: list[Row] = msgspec.convert(list(rows), _list_of(of_one), builtin_types=(bytes,))
    return found


def read_one(kind: type[Row], row: Any) -> Row:
    """As ``read_all`` for one that must be there."""
    if row is None:
        raise Damaged("a row is missing")
    return msgspec.convert(row, kind, builtin_types=(bytes,))


def read_value(kind: Any, row: Any) -> Any:
    """The only column of a row that must be there, as ``kind``."""
    return read_one(_tuple_of(kind), row)[0]


@functools.cache
def _list_of(kind: Any) -> Any:
    return list[kind]


@functools.cache
def _tuple_of(kind: Any) -> Any:
    return tuple[kind]


def check_object(item: StoredObject) -> None:
    """Raise ValueError unless the row of ``item`` could be read back."""
    planned = item.planned
    row = (
        1, 1, *_columns_of(planned.object_id), item.world_size, item.num_bytes, planned.num_bytes,
        planned.start_tokens, planned.end_tokens, item.ticket, item.last_use,
    )  # fmt: skip
    try:
        read_one(ObjectRow, row)
        msgspec.convert(item.fingerprint, Fingerprint)
    except msgspec.ValidationError as error:
        raise ValueError(f"{planned.object_id} cannot be kept: {error}") from None
    parents = planned.parents
    if len(parents) > MAX_PARENTS or len(set(parents)) < len(parents) or planned.start_tokens > planned.end_tokens:
        raise ValueError(f"{planned.object_id} has {parents} as parents and ends at {planned.end_tokens}")


def check_value(kind: Any, value: object) -> None:
    """Raise ValueError unless an argument is within the bounds of ``kind``."""
    try:
        msgspec.convert(value, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise ValueError(f"{value!r}: {error}") from None


def _columns_of(object_id: ObjectId) -> tuple[str, bytes]:
    return object_id.tag, object_id.key
