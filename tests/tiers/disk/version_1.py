# SPDX-License-Identifier: Apache-2.0
"""Headers of version 1 of the disk format, as vllm-overlay 0.1.0 to 0.2.0 wrote and read them, without parents."""

import hmac
import struct

import xxhash
from blake3 import blake3

from vllm_overlay.planner.objects import PlannedObject

_CONTEXT = "vllm-overlay disk tier: key of checksums, version 1"


def _checksum(secret: bytes, data: bytes) -> bytes:
    if not secret:
        return xxhash.xxh3_128_digest(data)
    return blake3(data, key=blake3(secret, derive_key_context=_CONTEXT).digest()).digest()


def header(planned: PlannedObject, fingerprint: bytes, payload: bytes, secret: bytes = b"") -> bytes:
    """The page of one of one rank; ``secret`` is what the key file held."""
    tag, key = planned.object_id.tag.encode(), planned.object_id.key
    fields = struct.pack(
        "<8sIIQQQQIIBB6x32s32s", b"HKVOBJ\r\n", 1, 4096, planned.num_bytes, planned.start_tokens, planned.end_tokens, 0,
        0, 1, 2 if secret else 1, 0, fingerprint, _checksum(secret, payload),
    )  # fmt: skip
    page = (fields + struct.pack("<BB6x8s64s", len(tag), len(key), tag, key)).ljust(4064, b"\0")
    return page + _checksum(secret, page).ljust(32, b"\0")


def is_header(page: bytes, secret: bytes = b"") -> bool:
    """Whether a reader of version 1 gets as far as the fields behind magic, version and algorithm."""
    checksum = _checksum(secret, page[:4064])
    found = struct.unpack_from("<8sII", page), page[56]
    return hmac.compare_digest(checksum, page[4064 : 4064 + len(checksum)]) and found == (
        (b"HKVOBJ\r\n", 1, 4096), 2 if secret else 1
    )  # fmt: skip
