# SPDX-License-Identifier: Apache-2.0
"""Request traces as in Mooncake's FAST'25 release: one JSON object a line, one opaque id a block of 512 tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

BLOCK_TOKENS = 512


class TraceError(ValueError):
    """A file that is no trace: one sentence with the line."""


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. ``block_ids`` name its whole blocks: equal ids mean equal content and equal prefix."""

    arrival_s: float
    num_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...]


def read_trace(path: Path, block_tokens: int = BLOCK_TOKENS) -> list[TraceRequest]:
    """All requests, in the order of the file. Raises TraceError, and OSError if it cannot be read.

    ``block_tokens``: tokens that one of the trace's ids stands for.
    """
    decoder = msgspec.json.Decoder(_Line)
    requests = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"line {number} of {path} is no request of a Mooncake trace: {error}") from None
        whole = found.input_length // block_tokens
        if found.input_length < 1 or len(found.hash_ids) < whole:
            raise TraceError(f"line {number} of {path} has {found.input_length} tokens, {len(found.hash_ids)} hash_ids")
        ids = tuple(found.hash_ids[:whole])
        requests.append(TraceRequest(found.timestamp / 1000, found.input_length, found.output_length, ids))
    if not requests:
        raise TraceError(f"{path} has no requests")
    return requests


def sharable_tokens(requests: Sequence[TraceRequest], block_tokens: int = BLOCK_TOKENS) -> int:
    """What an unlimited tier with a state at every block would restore: of each request the leading blocks that an
    earlier one had too, short of its last token."""
    seen: set[int] = set()
    shared = 0
    for request in requests:
        whole = request.block_ids[: (request.num_tokens - 1) // block_tokens]
        shared += next((place for place, block in enumerate(whole) if block not in seen), len(whole))
        seen.update(request.block_ids)
    return shared * block_tokens
