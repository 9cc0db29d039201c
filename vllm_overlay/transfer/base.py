# SPDX-License-Identifier: Apache-2.0
"""The transfer interface: objects between the engine's paged KV tensors and host buffers.

An object's bytes begin with the raw rows of its pages, group by group as placed, layer by layer. Its spans follow, in
the canonical order of its group's page map (``PageMap.order``).

A chunk is one span, or one page when its group cannot be cut. A snapshot is the pages of all recurrent groups, and the
spans between the last chunk boundary and its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.tiers.memory import HostBuffer


class Span(NamedTuple):
    """``num_tokens`` tokens from ``offset`` on in one block of an attention group."""

    group_id: int
    block_id: int
    offset: int
    num_tokens: int


class Placement(NamedTuple):
    """Where an object lies in the KV cache: whole pages as (group id, block id), and spans."""

    pages: tuple[tuple[int, int], ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def block_ids(self) -> set[int]:
        """The blocks of all groups that it touches."""
        return {block_id for _, block_id in self.pages} | {span.block_id for span in self.spans}


Handle = NewType("Handle", int)
"""Names one submitted copy; unique in the life of a transfer."""


@dataclass(frozen=True, slots=True)
class FinishedCopy:
    """A submitted copy has ended. Nothing of it touches the KV cache or host memory any more.

    ``error`` is None when every byte was copied.
    """

    handle: Handle
    error: BaseException | None = None


def error_of(copy: Callable[[], None]) -> BaseException | None:
    """What it raised, if anything."""
    try:
        copy()
    except SHUTDOWN:
        raise
    except BaseException as error:
        return error
    return None


class KVTransfer(ABC):
    """Copies between KV tensors and host buffers: submitted here, finished when ``poll`` says so.

    Called from the worker's main thread, inside its hooks only. A copy that was submitted cannot be taken back: until
    it is finished, its blocks and its buffers belong to it. Copies may finish in any order.
    """

    @abstractmethod
    def gather(self, placements: Sequence[Placement], buffers: Sequence[HostBuffer]) -> Handle | None:
        """KV cache to host: fill each buffer with its placement's bytes.

        What the blocks hold now is what arrives, whatever the engine computes into them afterwards. Returns None, and
        submits nothing, when there is no room for that many bytes on their way.
        """

    @abstractmethod
    def scatter(
        self, placements: Sequence[Placement], buffers: Sequence[HostBuffer], zeros: Sequence[Span] = ()
    ) -> Handle:
        """Host to KV cache. Then clear ``zeros``: what a load leaves beyond its last token must not stay as garbage."""

    @abstractmethod
    def poll(self) -> list[FinishedCopy]:
        """What has finished since the last call. Never waits."""

    def close(self, timeout_s: float) -> bool:
        """Wait so long for what was submitted. Returns whether all of it has finished. Called once, at shutdown."""
        return True
