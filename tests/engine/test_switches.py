# SPDX-License-Identifier: Apache-2.0
"""What a child of the MultiConnector sees, by its settings and by the control file, in one running engine."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.client import Engine, Output, cpu_child, disk_child, multi, prompt
from tests.engine.control_file import switch

pytestmark = pytest.mark.engine

LENGTH = 1157
RESTORABLE = (LENGTH - 1) // 64 * 64


class Switched:
    """One prompt, sent to an engine whose device cache is empty, under changing switches."""

    def __init__(self, engine: Engine, control: Path) -> None:
        self._engine, self._control = engine, control
        self._tokens = prompt(LENGTH, seed=1)
        self._cold: Output | None = None

    def sends(self, switches: dict[str, dict[str, Any]] | None) -> str:
        """From which child the prompt was restored; empty when it was computed. The answer is always the same."""
        switch(self._engine, self._control, switches)
        before = {child: self._loaded(child) for child in ("cpu", "disk")}
        answer = self._engine.generate(self._tokens)
        self._engine.evict()
        self._cold = self._cold or answer
        assert answer.same_as(self._cold)
        sources = [child for child, num_bytes in before.items() if self._loaded(child) > num_bytes]
        assert answer.num_cached_tokens == (RESTORABLE if sources else 0)
        return " ".join(sources)

    def _loaded(self, child: str) -> float:
        return self._engine.metric("vllm:hybrid_offload_loaded_bytes", connector=child)


def test_promotion_and_the_switches_of_a_running_engine(tiny_model: Path, tmp_path: Path) -> None:
    control = tmp_path / "control.json"
    config = multi(
        cpu_child(promote=False, max_load_attempts=2), disk_child(tmp_path / "root"), control_file=str(control)
    )
    with Engine(tiny_model, kv_transfer_config=config) as engine:
        assert engine.call("max_load_attempts") == 2 + 3  # the one's setting and the other's default
        prompted = Switched(engine, control)
        assert prompted.sends({"cpu": {"store": False}}) == ""  # the disk alone stores it
        assert prompted.sends({}) == "disk"
        assert prompted.sends({}) == "disk"  # what another child loads is not promoted
        assert prompted.sends({"disk": {"load": False}}) == ""  # computed, so stored by both
        assert prompted.sends({}) == "cpu"
        assert prompted.sends({"cpu": {"min_tokens": RESTORABLE + 1}}) == "disk"
        assert prompted.sends({"cpu": {"load": False}, "disk": {"load": False}}) == ""
        assert prompted.sends(None) == "cpu"
