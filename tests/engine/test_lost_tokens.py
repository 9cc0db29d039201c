# SPDX-License-Identifier: Apache-2.0
"""In a real engine: what each tier restores and loses of a prompt, why, and how long its first token took."""

from pathlib import Path

import pytest

from tests.engine.client import Engine, Output, cpu_child, disk_child, multi, prompt
from tests.engine.restore import assert_restored, restorable
from tests.engine.states import FLOAT32

pytestmark = pytest.mark.engine

LENGTH = 1300
WHOLE = restorable(LENGTH)
TAIL = LENGTH - WHOLE


class Tiers:
    """The engine, and what its tiers have counted since the last look."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._before: dict[tuple[str, ...], float] = {}

    def _since(self, metric: str, **labels: str) -> int:
        key = (metric, *labels.values())
        now = self.engine.metric(f"vllm:hybrid_offload_{metric}", **labels)
        before, self._before[key] = self._before.get(key, 0), now
        return int(now - before)

    def counted(self, tier: str) -> dict[str, int]:
        """Tokens by what became of them."""
        groups = {"attention": "full", "state": "recurrent", "not_taken": "", "load_failed": "", "prompt_end": ""}
        lost = {
            reason: self._since("lost_tokens", connector=tier, reason=reason, group_kind=group)
            for reason, group in groups.items()
        }
        found = {"restored": self._since("restored_tokens", connector=tier), **lost}
        assert self._since("queried_tokens", connector=tier) == sum(found.values())
        return {what: tokens for what, tokens in found.items() if tokens}

    def sources(self, tier: str) -> dict[str, int]:
        """Requests with a first token, by where their prompts came from."""
        found = {
            source: self._since("first_token_seconds", connector=tier, source=source)
            for source in ("tier", "device", "other", "computed")
        }
        return {source: requests for source, requests in found.items() if requests}

    def resend(self, tokens: list[int]) -> Output:
        self.engine.evict()
        return self.engine.generate(tokens)


def test_each_token_of_a_prompt_is_restored_or_lost_for_one_reason(tiny_model: Path, tmp_path: Path) -> None:
    config = multi(cpu_child(), disk_child(tmp_path / "root"))
    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=config) as engine:
        tiers, tokens = Tiers(engine), prompt(LENGTH, seed=1)
        cold = engine.generate(tokens)
        for tier in ("cpu", "disk"):
            assert tiers.counted(tier) == {"attention": WHOLE, "prompt_end": TAIL}
            assert tiers.sources(tier) == {"computed": 1}

        assert_restored(cold, tiers.resend(tokens), LENGTH)
        assert tiers.counted("cpu") == {"restored": WHOLE, "prompt_end": TAIL}
        assert tiers.counted("disk") == {"not_taken": WHOLE, "prompt_end": TAIL}
        assert (tiers.sources("cpu"), tiers.sources("disk")) == ({"tier": 1}, {"other": 1})

        assert engine.call("fault", name="drop_snapshots") > 0
        assert_restored(cold, tiers.resend(tokens), LENGTH)
        assert tiers.counted("cpu") == {"state": WHOLE, "prompt_end": TAIL}
        assert tiers.counted("disk") == {"restored": WHOLE, "prompt_end": TAIL}
        assert (tiers.sources("cpu"), tiers.sources("disk")) == ({"other": 1}, {"tier": 1})

        of_loads = {tier: engine.metric("vllm:hybrid_offload_load_seconds", connector=tier) for tier in ("cpu", "disk")}
        assert of_loads == {"cpu": 1, "disk": 1}
        for tier in ("cpu", "disk"):
            stored = engine.metric("vllm:hybrid_offload_stored_objects", connector=tier)
            assert engine.metric("vllm:hybrid_offload_store_seconds", connector=tier) == stored > 0
            assert engine.metric("vllm:hybrid_offload_lookup_seconds", connector=tier) >= 3
