# SPDX-License-Identifier: Apache-2.0
"""The transfer interface: objects between the engine's paged KV tensors and host buffers.

An object's bytes, in order: the raw rows of its pages (group by group as placed, layer by layer), then its spans in
the canonical order (layer, key/value, token, head, dimension). A chunk is one span, or one page when its group cannot
be cut; a snapshot is the pages of all recurrent groups and the spans between the last chunk boundary and its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_overlay.tiers.memory import HostBuffer


@dataclass(frozen=True, slots=True)
class Span:
    """``num_tokens`` tokens from ``offset`` on in one block of an attention group."""

    group_id: int
    block_id: int
    offset: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an object lies in the KV cache: whole pages as (group id, block id), and spans."""

    pages: tuple[tuple[int, int], ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def block_ids(self) -> set[int]:
        """The blocks of all groups that it touches."""
        return {block_id for _, block_id in self.pages} | {span.block_id for span in self.spans}


class KVTransfer(ABC):
    """Copies between KV tensors and host buffers. Called from the worker's main thread, inside its hooks only."""

    @abstractmethod
    def gather(self, placements: Sequence[Placement], buffers: Sequence[HostBuffer]) -> None:
        """KV cache to host: fill each buffer with its placement's bytes. Done when it returns."""

    @abstractmethod
    def scatter(self, placements: Sequence[Placement], buffers: Sequence[HostBuffer]) -> None:
        """Host to KV cache. Done when it returns."""

    @abstractmethod
    def zero(self, spans: Sequence[Span]) -> None:
        """Clear attention tokens: what a load leaves beyond its last token must not stay as garbage."""
