# SPDX-License-Identifier: Apache-2.0
"""What travels between the halves about LoRA adapters."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """What a rank has loaded under the id of a LoRA adapter.

    ``digest`` is of all its weights, empty when they could not be read. ``is_only`` says that nothing else was loaded
    under its name and path since the process began: what the device cache holds by these was computed with it.
    ``generation`` counts what was loaded under the id: weights that went and came back are told from ones that stayed.
    """

    adapter_id: int
    digest: bytes
    is_only: bool = True
    generation: int = 1


@dataclass(frozen=True, slots=True)
class AdapterCheck:
    """A restored request that this pass computes with for the first time, and the blocks of what was loaded for it.

    They are bad unless its adapter is still ``weights``.
    """

    request_id: str
    weights: AdapterWeights
    block_ids: frozenset[int]
