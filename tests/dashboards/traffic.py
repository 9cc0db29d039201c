# SPDX-License-Identifier: Apache-2.0
"""Traffic that misses, hits each tier and vLLM's own cache, and fails; with the client's own count of it."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.engine.client import prompt
from tests.engine.damage import flip
from tests.waiting import until
from vllm_overlay.server.api_client import ApiClient, Completion

LENGTHS = (1300, 1500, 2400, 2600)
_OBJECT_BYTES = 65536
"""Files at least as large hold chunks or snapshots."""


@dataclass(slots=True)
class Ledger:
    """What the client saw: tokens of its prompts, and how many of them the server says were cached."""

    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, completion: Completion) -> None:
        self.prompt_tokens += completion.num_prompt_tokens
        self.cached_tokens += completion.num_cached_tokens


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests to a server with the children ``cpu`` and ``disk``, of which ``cpu`` weighs more.

    ``switches`` is its control file, ``root`` the disk tier's, ``log`` the server's log. Each method is one kind of
    traffic with a ledger of its own, and returns when the server has counted it. They are called in this order.
    """

    api: ApiClient
    switches: Path
    root: Path
    log: Path
    ledgers: dict[str, Ledger] = field(default_factory=lambda: defaultdict(Ledger))

    def misses(self) -> None:
        self._ask_all("misses")

    def cpu_hits(self) -> None:
        self._ask_all("cpu")

    def disk_hits(self) -> None:
        """The CPU tier's offers are ignored from here on."""
        self._switch({"cpu": {"load": False}})
        self._ask_all("disk")

    def device_hits(self) -> None:
        """The last prompt again, which is still in vLLM's own cache."""
        self._ask("device", len(LENGTHS) - 1)

    def failures(self) -> None:
        """Every object on disk is damaged before it is asked for."""
        flip([path for path in self.root.rglob("*") if path.is_file() and path.stat().st_size >= _OBJECT_BYTES])
        self._ask_all("failures")

    def _ask_all(self, ledger: str) -> None:
        for place in range(len(LENGTHS)):
            self.api.reset_prefix_cache()
            self._ask(ledger, place)

    def _ask(self, ledger: str, place: int) -> None:
        self.ledgers[ledger].add(self.api.complete(prompt(LENGTHS[place], seed=place)))
        self.api.wait_for_stores()

    def _switch(self, switches: dict[str, dict[str, bool]]) -> None:
        """Waits until the server says that it has read them. It looks while it serves, so that needs requests."""
        self.switches.write_text(json.dumps(switches))

        def are_read() -> bool:
            if "the children's switches are now" in self.log.read_text():
                return True
            self.ledgers["short"].add(self.api.complete(prompt(20, seed=len(LENGTHS))))
            return False

        until(are_read, f"the server's word that it has read {self.switches}")
