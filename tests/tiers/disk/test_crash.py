# SPDX-License-Identifier: Apache-2.0
"""The crash test. The long form is ``python -m tests.tiers.disk.test_crash --kills 500`` (``make test-crash``)."""

import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

import pytest

from tests.tiers.disk.crash import CAPACITY, Crash, Tally
from tests.tiers.disk.engine import object_files


@pytest.mark.slow
def test_kill_9_leaves_nothing_wrong_nothing_unreadable_and_no_litter(tmp_path):
    crash = Crash(tmp_path / "root", seed=5)
    while crash.tally.kills < 15 or (crash.tally.kills < 60 and not has_seen_enough(crash.tally)):
        crash.round()
        assert crash.tally.is_sound, crash.tally
    assert has_seen_enough(crash.tally), crash.tally
    assert crash.tally.most_bytes <= CAPACITY


def has_seen_enough(tally: Tally) -> bool:
    """Whether its processes got to store, as those of a busy machine may not."""
    return tally.objects_read > 100 and tally.by_call > 2 and tally.most_bytes > CAPACITY // 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--root", type=Path, help="default: a new directory, removed when all is well")
    arguments = parser.parse_args()
    root = arguments.root or Path(tempfile.mkdtemp(prefix="crash-")) / "root"
    crash = Crash(root, arguments.seed)
    started = time.monotonic()
    for turn in range(arguments.kills):
        crash.round()
        if not crash.tally.is_sound:
            break
        if sys.stderr.isatty():
            print(
                f"\r{turn + 1} of {arguments.kills} kills, {crash.tally.objects_read} objects read",
                end="",
                file=sys.stderr,
            )
    print(f"\nseed {arguments.seed}, {time.monotonic() - started:.0f} s, limit {CAPACITY} bytes")
    for field in fields(crash.tally):
        print(f"{field.name:18} {getattr(crash.tally, field.name)}")
    if crash.tally.is_sound and arguments.root is None:
        shutil.rmtree(root.parent)
        return 0
    print(f"left for inspection: {root} ({len(object_files(root))} files)")
    return 0 if crash.tally.is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
