# SPDX-License-Identifier: Apache-2.0
"""What goes in and comes out, with the bounds that both must keep."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from types import GenericAlias
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.catalogue.errors import Damaged

BATCH_ROWS = 256
MAX_PARENTS = 8
MAX_ID = 2**62
MAX_BYTES = 2**53
MAX_TOKENS = 2**40
MAX_SECONDS = 2**40
MAX_SCORE = 1e15
MAX_RANKS = 10_000
MAX_KEY_BYTES = 64
MAX_KIND_CHARS = 17

Id = Annotated[int, Meta(ge=1, le=MAX_ID)]
WriterId = int
"""The 16 hex digits of a writer's name as SQLite's integer of 64 bits: a row of its own is not needed to know it."""
NumBytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
ObjectBytes = Annotated[int, Meta(ge=1, le=MAX_BYTES)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Number = Annotated[int, Meta(ge=0, le=MAX_ID)]
Seconds = Annotated[int, Meta(ge=0, le=MAX_SECONDS)]
Score = Annotated[float, Meta(ge=-MAX_SCORE, le=MAX_SCORE)]
WorldSize = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Position = Annotated[int, Meta(ge=0, lt=MAX_PARENTS)]
Flag = Annotated[int, Meta(ge=0, le=1)]
Writer = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Fingerprint = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Kind = Annotated[str, Meta(pattern=r"\A(?:s[0-9a-f]{16}|[fw][0-9]{1,3})\Z", max_length=MAX_KIND_CHARS)]
Key = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Row = TypeVar("Row")
_Item = TypeVar("_Item")


class File(msgspec.Struct, frozen=True, order=True, gc=False):
    """The files of all ranks of one object: a number in the directory of a writer."""

    writer: str
    number: int


class StoredObject(msgspec.Struct, frozen=True, gc=False):
    """One object. ``num_bytes`` is what all ranks' files take; ``planned.num_bytes`` is one rank's payload.

    Tags are kinds: a snapshot's is ``s`` and 16 hex digits. ``last_use`` is in seconds since the epoch.
    ``planned.group_id`` is not kept.
    """

    fingerprint: str
    planned: PlannedObject
    file: File
    world_size: int
    num_bytes: int
    last_use: int

    @property
    def object_id(self) -> ObjectId:
        return self.planned.object_id


class Garbage(msgspec.Struct, frozen=True, gc=False):
    """Files to unlink: one a rank, of ``num_bytes`` together."""

    file: File
    world_size: int
    num_bytes: int


class ObjectRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A row of ``object``, in the order of ``COLUMNS``. Made by ``read_objects``, which looks at ``kind`` too."""

    id: Id
    namespace: Id
    kind: str
    key: Key
    writer: WriterId
    number: Number
    world_size: WorldSize
    num_bytes: ObjectBytes
    payload_bytes: ObjectBytes
    start_tokens: Tokens
    end_tokens: Tokens
    last_use: Seconds

    @property
    def object_id(self) -> ObjectId:
        return ObjectId(self.kind, self.key)

    def stored(self, fingerprint: str, object_id: ObjectId, parents: tuple[ObjectId, ...]) -> StoredObject:
        """The object of this row, whose name the caller may have."""
        planned = PlannedObject(object_id, parents, self.start_tokens, self.end_tokens, self.payload_bytes)
        file = File(name_of(self.writer), self.number)
        return StoredObject(fingerprint, planned, file, self.world_size, self.num_bytes, self.last_use)


COLUMNS = ", ".join(ObjectRow.__struct_fields__)


@functools.lru_cache(4096)
def name_of(writer: int) -> str:
    """The name of a writer by its number in the file."""
    return writer.to_bytes(8, "big", signed=True).hex()


@functools.lru_cache(4096)
def number_of(writer: str) -> int:
    """The number of a writer's name. Raises ValueError for anything but 16 hex digits."""
    check_value(Writer, writer)
    return int.from_bytes(bytes.fromhex(writer), "big", signed=True)


def file_columns(file: File) -> tuple[int, int]:
    """As the columns ``writer, number``. Raises ValueError."""
    check_value(Number, file.number)
    return number_of(file.writer), file.number


def fields_of(item: StoredObject) -> tuple[int, ...]:
    """As the columns from ``writer`` on."""
    planned, file = item.planned, item.file
    return (
        number_of(file.writer), file.number, item.world_size, item.num_bytes, planned.num_bytes, planned.start_tokens,
        planned.end_tokens, item.last_use,
    )  # fmt: skip


def read_all(kind: type[Row], rows: Iterable[Any]) -> list[Row]:
    """Rows of the file as ``kind``; raises msgspec.ValidationError, which a transaction turns into Damaged."""
    found: list[Row] = msgspec.convert(list(rows), GenericAlias(list, (kind,)), builtin_types=(bytes,))
    return found


def read_objects(rows: Iterable[Any]) -> list[ObjectRow]:
    """Rows of ``object``, as ``read_all``. They have few kinds: each is matched once."""
    found = read_all(ObjectRow, rows)
    read_all(Kind, {row.kind for row in found})
    return found


def read_one(kind: type[Row], row: Any) -> Row:
    """As ``read_all`` for one that must be there."""
    if row is None:
        raise Damaged("a row is missing")
    return msgspec.convert(row, kind, builtin_types=(bytes,))


def read_value(kind: Any, row: Any) -> Any:
    """The only column of a row that must be there, as ``kind``."""
    of_one: Any = GenericAlias(tuple, (kind,))
    return read_one(of_one, row)[0]


def check_objects(items: Sequence[StoredObject]) -> None:
    """Raise ValueError unless the rows of all of them could be read back."""
    try:
        read_objects((1, 1, item.object_id.tag, item.object_id.key, *fields_of(item)) for item in items)
    except msgspec.ValidationError as error:
        raise ValueError(f"an object cannot be kept: {error}") from None
    check_value(Fingerprint, *{item.fingerprint for item in items})
    for item in items:
        parents, planned = item.planned.parents, item.planned
        is_wrong = len(parents) > 1 and (len(parents) > MAX_PARENTS or len(set(parents)) < len(parents))
        if is_wrong or planned.start_tokens > planned.end_tokens:
            raise ValueError(f"{planned.object_id} has {parents} as parents and ends at {planned.end_tokens}")


def check_value(kind: Any, *values: object) -> None:
    """Raise ValueError unless these arguments are within the bounds of ``kind``."""
    for value in values:
        try:
            msgspec.convert(value, kind, builtin_types=(bytes,))
        except msgspec.ValidationError as error:
            raise ValueError(f"{value!r}: {error}") from None


def batches(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """As many as one transaction takes."""
    iterator = iter(items)
    while part := list(itertools.islice(iterator, BATCH_ROWS)):
        yield part
