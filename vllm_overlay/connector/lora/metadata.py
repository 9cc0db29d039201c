# SPDX-License-Identifier: Apache-2.0
"""What travels between the halves about LoRA adapters."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """What a rank has loaded under the id of a LoRA adapter.

    ``digest`` is of all its weights, and empty when they could not be read. ``is_only`` says that nothing else was
    loaded under its name and path since the process began. Then all that the device cache holds by that name and path
    was computed with it. ``generation`` counts what was loaded under the id. So weights that went and came back differ
    from weights that stayed.
    """

    adapter_id: int
    digest: bytes
    is_only: bool = True
    generation: int = 1


@dataclass(frozen=True, slots=True)
class AdapterCheck:
    """A restored request that this pass computes with for the first time, and the blocks that were loaded for it. The
    blocks are bad unless the request's adapter is still ``weights``."""

    request_id: str
    weights: AdapterWeights
    block_ids: frozenset[int]
