# SPDX-License-Identifier: Apache-2.0
"""A real server under traffic with a real Prometheus beside it; used by a test and by the command for pictures."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.dashboards.prometheus import Prometheus
from tests.dashboards.prometheus_api import PrometheusApi
from tests.dashboards.traffic import Traffic
from tests.engine.client import cpu_child, disk_child, multi
from tests.engine.states import FLOAT32
from tests.http.warm_server import WarmServer
from tests.waiting import until

SCRAPE_INTERVAL_S = 1.0
ALIGNED_S = 0.01
"""A scrape may have begun so much earlier than it says: Prometheus makes intervals even, by up to 1%."""
_LAST_SCRAPE = 'timestamp(vllm:num_requests_running{job="vllm"})'


@dataclass(frozen=True, slots=True)
class Observed:
    """``started`` is when Prometheus had seen the server before its first request."""

    traffic: Traffic
    prometheus: PrometheusApi
    started: float

    def seen(self) -> float:
        """Waits until Prometheus has seen everything that the server has counted by now; that time."""
        return _scraped_after(self.prometheus, time.time())


@contextlib.contextmanager
def observed(model: Path, directory: Path) -> Iterator[Observed]:
    """Until the end of the block."""
    root, switches, log = directory / "root", directory / "switches.json", directory / "server.log"
    config = multi(cpu_child(), disk_child(root), control_file=str(switches))
    # Else the first request would compile for seconds how logprobs are ranked.
    server = WarmServer(model, config, log_path=log, arguments=FLOAT32.flags, environment={"TORCHDYNAMO_DISABLE": "1"})
    target = server.url.removeprefix("http://")
    with server as api, Prometheus(directory / "prometheus", target, SCRAPE_INTERVAL_S) as prometheus:
        started = _scraped_after(prometheus, time.time())
        yield Observed(Traffic(api, switches, root, log), prometheus, started)


def _scraped_after(prometheus: PrometheusApi, moment: float) -> float:
    """When the first scrape that began after ``moment`` was in."""

    def later_scrape() -> float | None:
        found = prometheus.query(_LAST_SCRAPE, time.time())
        at = found[0].samples[0][1] if found else 0.0
        return at if at > moment + ALIGNED_S else None

    seen = until(later_scrape, "a scrape of the server by Prometheus")
    assert seen is not None
    return seen
