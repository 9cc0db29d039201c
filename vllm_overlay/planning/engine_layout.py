# SPDX-License-Identifier: Apache-2.0
"""How an engine will cut its KV cache: what a dry start and the formula both answer."""

from dataclasses import dataclass

from vllm_overlay.planner.geometry import Group, common_block_size


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """One rank's groups and what decides them. ``block_size`` is vLLM's (unified) block size N in tokens.

    ``state_dtype`` is empty for a model without recurrent states. What is None was not found out.
    """

    origin: str
    """How this was obtained, in words."""
    groups: tuple[Group, ...]
    block_size: int
    dtype: str
    state_dtype: str = ""
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None

    @property
    def has_states(self) -> bool:
        return any(not group.is_attention for group in self.groups)

    @property
    def default_match_unit(self) -> int:
        """The match unit that vLLM takes when none is given."""
        return common_block_size(self.groups)

    @property
    def takes_match_unit(self) -> bool:
        """vLLM refuses a match unit below the block size when there is a single group."""
        return len(self.groups) > 1
