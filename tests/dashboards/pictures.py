# SPDX-License-Identifier: Apache-2.0
"""Draw both dashboards from a real run: a server with the tiny model under traffic for some minutes, and a Prometheus.

The traffic: prompts that miss, prompts that both tiers have, prompts that only the disk tier may load, and in the end
damaged files. Writes docs/images/overview.png and internals.png.
"""

import argparse
import tempfile
from pathlib import Path

from tests.dashboards.boards import NAMES, read
from tests.dashboards.drawing import Period, draw
from tests.dashboards.observed import observed
from tests.dashboards.prometheus import REPOSITORY
from tools.tiny_model import make_tiny_model

IMAGES = REPOSITORY / "docs" / "images"
STEP_S = 1.0
WINDOW_S = 15
"""Grafana takes four scrapes at least; these are a second apart."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.dashboards.pictures", description=__doc__)
    parser.add_argument("--directory", type=Path, default=IMAGES, help="default: docs/images of this checkout")
    parser.add_argument("--rounds", type=int, default=10, help="how often each kind of hit is repeated (default 10)")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = make_tiny_model(directory / "tiny")
        print("a server is started ...", flush=True)
        with observed(model, directory) as run:
            run.traffic.misses()
            for kind in (run.traffic.cpu_hits, run.traffic.disk_hits, run.traffic.device_hits):
                print(f"traffic: {kind.__name__} ...", flush=True)
                for _ in range(options.rounds):
                    kind()
            run.traffic.failures()
            run.traffic.misses()
            period = Period(run.started, run.seen(), STEP_S, WINDOW_S)
            for board in NAMES:
                path = options.directory / f"{board}.png"
                draw(read(board), run.prometheus, period, path)
                print(f"{path}: written", flush=True)


if __name__ == "__main__":
    main()
