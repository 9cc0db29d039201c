# SPDX-License-Identifier: Apache-2.0
"""Write the dashboards' JSON to ``dashboards/``; with --check, say which file is not what the code makes."""

import argparse
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from devtools.dashboards.internals import internals
from devtools.dashboards.overview import overview

DIRECTORY = Path(__file__).resolve().parents[2] / "dashboards"


def files() -> dict[str, str]:
    """Name -> content."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    boards = {"overview.json": overview(), "internals.json": internals()}
    return {name: encoder.encode(board.build()) + "\n" for name, board in boards.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m devtools.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="default: dashboards/ of this checkout")
    options = parser.parse_args(arguments)
    stale = [
        name
        for name, content in files().items()
        if not (options.directory / name).exists() or (options.directory / name).read_text() != content
    ]
    if options.check:
        for name in stale:
            print(f"dashboards/{name} is not what its code makes: run make dashboards", file=sys.stderr)
        return int(bool(stale))
    options.directory.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (options.directory / name).write_text(content)
        print(f"{options.directory / name}: {'written' if name in stale else 'unchanged'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
