# SPDX-License-Identifier: Apache-2.0
"""Groups of a model, the size of a chunk, and what can be cut: the arithmetic every other room relies on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_overlay.planner.objects import SNAPSHOT_TAG, ObjectId, ObjectKind, chunk_tag

EXACT_TOKENS = 64
"""GDN kernels work in chunks of this many tokens; restores at its multiples are bit-exact."""

AUTO_CHUNK_TOKENS = 64
"""The largest chunk that ``auto`` picks when no object size is aimed at."""


class GeometryError(ValueError):
    """A model layout or ``hybrid_chunk_size`` that cannot work. One sentence names the setting and a value that
    works."""


class GroupKind(StrEnum):
    FULL = "full_attention"
    WINDOW = "sliding_window"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group of vLLM as one rank sees it.

    ``block_size`` is in tokens. ``token_bytes`` is the attention KV of one token in all layers of the group, 0 when
    recurrent. ``page_bytes`` is what moves when a whole block of all its layers moves raw. ``sliceable`` says that a
    page can be cut by token.

    ``window`` is the sliding window in tokens, the token being computed included. With ``is_chunked`` it does not
    slide: attention is local to chunks of the prompt, of ``window`` tokens each.
    """

    group_id: int
    kind: GroupKind
    block_size: int
    token_bytes: int
    page_bytes: int
    sliceable: bool
    window: int = 0
    is_chunked: bool = False

    @property
    def is_attention(self) -> bool:
        return self.kind is not GroupKind.RECURRENT

    @property
    def is_full(self) -> bool:
        return self.kind is GroupKind.FULL

    def first_visible(self, boundary: int) -> int:
        """The first token that the one at ``boundary`` sees, in a group with a window."""
        if self.is_chunked:
            return boundary - boundary % self.window
        return max(0, boundary - self.window + 1)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How prompts of one model are cut for one tier. Made by ``build`` when a connector learns the KV cache layout.

    ``match_unit`` and ``chunk_size`` are in tokens, all sizes in bytes of one rank. ``keys`` are a request's block
    hashes in every method: ``keys[i]`` names tokens [0, (i + 1) * match_unit).
    """

    groups: tuple[Group, ...]
    match_unit: int
    chunk_size: int
    attention: tuple[Group, ...] = field(init=False, repr=False, compare=False)
    full: tuple[Group, ...] = field(init=False, repr=False, compare=False)
    windows: tuple[Group, ...] = field(init=False, repr=False, compare=False)
    recurrent: tuple[Group, ...] = field(init=False, repr=False, compare=False)
    restore_unit: int = field(init=False, repr=False, compare=False)
    """Every restore point is a multiple of this many tokens."""
    _tags: dict[int, str] = field(init=False, repr=False, compare=False)
    _splittable: frozenset[int] = field(init=False, repr=False, compare=False)
    _sizes: dict[int, int] = field(init=False, repr=False, compare=False)
    _bytes: dict[int, int] = field(init=False, repr=False, compare=False)
    state_bytes: int = field(init=False, repr=False, compare=False)
    """Bytes of all recurrent states after one boundary: what a snapshot holds beside its tail."""
    _tail_bytes: int = field(init=False, repr=False, compare=False)
    """Of one token of a snapshot's tail: in every group that is cut."""

    def __post_init__(self) -> None:
        attention = tuple(group for group in self.groups if group.is_attention)
        self._derive("attention", attention)
        self._derive("full", tuple(group for group in attention if group.is_full))
        self._derive("windows", tuple(group for group in attention if not group.is_full))
        self._derive("recurrent", tuple(group for group in self.groups if not group.is_attention))
        kinds = {GroupKind.FULL: ObjectKind.FULL_ATTENTION, GroupKind.WINDOW: ObjectKind.SLIDING_WINDOW}
        self._derive("_tags", {group.group_id: chunk_tag(kinds[group.kind], n) for n, group in enumerate(attention)})
        splittable = [group for group in attention if group.sliceable and group.block_size % self.chunk_size == 0]
        self._derive("_splittable", frozenset(group.group_id for group in splittable))
        is_cut = self.is_splittable
        sizes = {group.group_id: self.chunk_size if is_cut(group) else group.block_size for group in attention}
        self._derive("_sizes", sizes)
        cut_bytes = {group.group_id: self.chunk_size * group.token_bytes for group in splittable}
        self._derive("_bytes", {group.group_id: group.page_bytes for group in attention} | cut_bytes)
        self._derive("restore_unit", self._restore_unit())
        self._derive("state_bytes", sum(group.page_bytes for group in self.recurrent))
        self._derive("_tail_bytes", sum(group.token_bytes for group in splittable))

    def _derive(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _restore_unit(self) -> int:
        if not self.recurrent:
            return math.lcm(self.match_unit, *self._sizes.values())
        whole = (group.block_size for group in self.attention if not self.is_splittable(group))
        return math.lcm(self.match_unit, *whole)

    @classmethod
    def build(
        cls, groups: Sequence[Group], match_unit: int, setting: int | str, target_bytes: int | None = None
    ) -> "Geometry":
        """The geometry of ``groups`` under ``hybrid_chunk_size`` = ``setting``; raises GeometryError."""
        chunk_size = resolve_chunk_size(groups, match_unit, setting, target_bytes=target_bytes)
        return cls(tuple(groups), match_unit, chunk_size)

    @property
    def anchor(self) -> Group | None:
        """The first full-attention group: windows and snapshots hang below its chunks. None when there is none."""
        return self.full[0] if self.full else None

    @property
    def completes_local_attention(self) -> bool:
        """Whether a state alone can make a restore point of a longer local hit. Only the one full-attention group may
        be ahead of it, since vLLM shows nothing of the others' local hits."""
        return bool(self.recurrent) and len(self.attention) == len(self.full) == 1

    def is_splittable(self, group: Group) -> bool:
        """Whether one block of ``group`` is cut into chunks of ``chunk_size``; else its chunk is a whole page."""
        return group.group_id in self._splittable

    def tag(self, group: Group) -> str:
        """The kind of the chunks of an attention group: ``f<n>`` or ``w<n>``, n counting attention groups."""
        return self._tags[group.group_id]

    def chunk_size_of(self, group: Group) -> int:
        """Tokens in one chunk of an attention group."""
        return self._sizes[group.group_id]

    def chunk_bytes(self, group: Group) -> int:
        """Bytes of one chunk of an attention group."""
        return self._bytes[group.group_id]

    @property
    def token_bytes(self) -> float:
        """Bytes of one token in all attention groups. Where pages are moved whole it is the token's share of a page."""
        return sum(self.chunk_bytes(group) / self.chunk_size_of(group) for group in self.attention)

    @property
    def smallest_object_bytes(self) -> int:
        """Bytes of the smallest chunk, or of a snapshot in a model without attention."""
        return min(map(self.chunk_bytes, self.attention), default=self.max_snapshot_bytes)

    @property
    def largest_object_bytes(self) -> int:
        """Bytes of the largest chunk or snapshot."""
        return max(*map(self.chunk_bytes, self.attention), self.max_snapshot_bytes, 0)

    def tail_tokens(self, boundary: int) -> int:
        """Tokens between the last chunk end and ``boundary`` in every splittable group: what a snapshot adds."""
        return boundary % self.chunk_size if self._splittable else 0

    def snapshot_bytes(self, boundary: int) -> int:
        """Bytes of the snapshot of ``boundary``: all states, and the tail of every splittable attention group."""
        return self.state_bytes + self.tail_tokens(boundary) * self._tail_bytes

    @property
    def max_snapshot_bytes(self) -> int:
        """Bytes of the largest snapshot that any boundary can have."""
        return self.state_bytes + (self.chunk_size - math.gcd(self.chunk_size, self.restore_unit)) * self._tail_bytes

    def is_restore_point(self, boundary: int) -> bool:
        """Whether a request could ever be restored at ``boundary``, and so whether a snapshot of it has any use."""
        return boundary > 0 and boundary % self.restore_unit == 0

    def floor_to_restore_point(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.restore_unit

    def window_chunks(self, group: Group, boundary: int, num_local: int = 0) -> range:
        """Indices of the chunks that a window group needs to go on at ``boundary`` beyond ``num_local`` local tokens.

        The next token sees what follows ``group.first_visible``; its block is needed whole, as vLLM and who stores take
        it for computed. The tail of that range is the snapshot's. What lies below ``num_local`` is in the KV cache
        already: a local hit holds its own window.
        """
        size, first = self.chunk_size_of(group), group.first_visible(boundary)
        return range(max(first - first % group.block_size, num_local) // size, boundary // size)

    def chunk_id(self, keys: Sequence[bytes], group: Group, index: int) -> ObjectId:
        """Names the ``index``-th chunk of an attention group."""
        end = (index + 1) * self.chunk_size_of(group)
        return ObjectId(self.tag(group), keys[end // self.match_unit - 1])

    def chunk_ids(self, keys: Sequence[bytes], group: Group, indices: range) -> list[ObjectId]:
        """As ``chunk_id`` for each of these."""
        tag, keys_a_chunk = self.tag(group), self.chunk_size_of(group) // self.match_unit
        return [ObjectId(tag, keys[(index + 1) * keys_a_chunk - 1]) for index in indices]

    def snapshot_id(self, keys: Sequence[bytes], boundary: int) -> ObjectId:
        """Names the snapshot of ``boundary``."""
        return ObjectId(SNAPSHOT_TAG, keys[boundary // self.match_unit - 1])

    def describe(self) -> str:
        """One line for the start-up log: what was chosen, what it means, and which flag would refine it."""
        line = (
            f"chunks of {self.chunk_size} tokens, match unit {self.match_unit}, "
            f"restore points at multiples of {self.restore_unit}"
        )
        if self.recurrent:
            verdict = "are" if self.match_unit % EXACT_TOKENS == 0 else "are not"
            line += f"; restores {verdict} bit-exact with GDN kernels ({EXACT_TOKENS}-token chunks)"
        finer = finer_match_unit(self.groups)
        if self.match_unit == common_block_size(self.groups) and finer < self.match_unit:
            # vLLM refuses a match unit below the block size when there is a single group.
            flag = "--prefix-match-unit" if len(self.groups) > 1 else "--block-size"
            line += f"; {flag} {finer} would refine them"
        return line


def common_block_size(groups: Sequence[Group]) -> int:
    """The greatest common divisor of the groups' block sizes: vLLM's own match unit when none is given."""
    return math.gcd(*(group.block_size for group in groups))


def finer_match_unit(groups: Sequence[Group]) -> int:
    """The match unit to recommend: the largest divisor of every block size up to 64, and a multiple of 8 if there is
    one."""
    common = common_block_size(groups)
    divisors = [n for n in range(1, EXACT_TOKENS + 1) if common % n == 0]
    return max([n for n in divisors if n % 8 == 0] or divisors)


def check_groups(groups: Sequence[Group], match_unit: int) -> None:
    """Raises GeometryError when ``groups`` are no KV cache or ``match_unit`` does not divide their attention blocks."""
    if not groups or len({group.group_id for group in groups}) != len(groups):
        raise GeometryError("the KV cache groups of a model must be at least one, each with its own group id")
    for group in groups:
        if group.block_size < 1 or group.token_bytes < 0 or group.page_bytes < 0:
            raise GeometryError(f"KV cache group {group.group_id} has a block of {group.block_size} tokens, no layout")
        if group.kind is GroupKind.WINDOW and group.window < 1:
            raise GeometryError(f"sliding-window group {group.group_id} has a window of {group.window} tokens")
    sizes = sorted({group.block_size for group in groups if group.is_attention})
    if match_unit < 1 or any(size % match_unit for size in sizes):
        raise GeometryError(
            f"--prefix-match-unit {match_unit} must divide every attention block size, here {_join(sizes)}: "
            f"{finer_match_unit(groups)} does"
        )


def resolve_chunk_size(
    groups: Sequence[Group], match_unit: int, setting: int | str, *, target_bytes: int | None = None
) -> int:
    """Tokens in a chunk, from ``hybrid_chunk_size`` = ``setting``. Raises GeometryError.

    A size is valid if it is a multiple of ``match_unit`` and divides every sliceable block size. ``auto`` without
    ``target_bytes`` (CPU tier) is the largest valid size up to 64, else the match unit. With ``target_bytes`` (disk
    tier) it is the smallest valid size whose chunk of the largest group has at least that many bytes in a rank. If
    there is none, it is the common block size.
    """
    check_groups(groups, match_unit)
    if setting != "auto" and (isinstance(setting, bool) or not isinstance(setting, int)):
        raise GeometryError(f'hybrid_chunk_size={setting!r} must be "auto" or a number of tokens such as {match_unit}')
    attention = [group for group in groups if group.is_attention]
    sliceable = [group for group in attention if group.sliceable]
    valid = _valid_sizes(sliceable, match_unit)
    if setting != "auto" and (setting not in valid if sliceable else int(setting) < 1):
        raise _invalid_chunk_size(int(setting), sliceable, match_unit, valid or [match_unit])
    if not sliceable:
        return common_block_size(attention) if attention else match_unit
    if setting != "auto":
        return int(setting)
    if target_bytes is None:
        return max([size for size in valid if size <= AUTO_CHUNK_TOKENS], default=match_unit)
    token_bytes = max(group.token_bytes for group in sliceable)
    return min([size for size in valid if size * token_bytes >= target_bytes], default=valid[-1])


def _valid_sizes(sliceable: Sequence[Group], match_unit: int) -> list[int]:
    common = common_block_size(sliceable)
    return [size for size in range(match_unit, common + 1, match_unit) if common % size == 0]


def _invalid_chunk_size(setting: int, sliceable: Sequence[Group], match_unit: int, valid: list[int]) -> GeometryError:
    below = [size for size in valid if size < setting][-1:]
    above = [size for size in valid if size > setting][:1]
    sizes = sorted({group.block_size for group in sliceable})
    hint = " (a smaller --prefix-match-unit allows more)" if valid == [match_unit] else ""
    return GeometryError(
        f"hybrid_chunk_size={setting} must be a multiple of the match unit {match_unit} that divides every block size, "
        f"here {_join(sizes)}: the nearest valid values are {_join(below + above)}{hint}"
    )


def _join(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers)) or "none"
