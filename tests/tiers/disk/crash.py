# SPDX-License-Identifier: Apache-2.0
"""Kills a process that stores, recovers, reads everything.

What was committed last must be served afterwards, also when the catalogue is lost too.

Two ranks with real threads and files store, drop, clear and evict under a small limit. Half of the processes are
killed at a random moment, half kill themselves in a random call on a file or a COMMIT of the catalogue: before it,
after it, or half through a write. Then another process recovers the root and reads all that it found, in both ranks.

The command: ``python -m tests.tiers.disk.crash --kills 500 --seed 1`` (``make test SUITE=crash``).
"""

import argparse
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

from tests.tiers.disk import crash_processes
from tests.tiers.disk.crash_processes import CAPACITY, Tally, examine, store_until_killed
from tests.tiers.disk.files import bytes_under, lose_catalogue, object_files
from tests.waiting import PATIENCE_S

_CALLS = ("open", "pwritev", "unlink", "mkdir", "lstat", "commit")
_WHENS = ("before", "after", "half")
_LOST = 0.1
"""So often the catalogue is lost with the process."""


class Crash:
    """Rounds of storing, killing and recovering on one root."""

    def __init__(self, root: Path, seed: int) -> None:
        self.tally = Tally()
        self._root = root
        self._diary = root.with_name(f"{root.name}.diary")
        self._random = random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([crash_processes.__name__])

    def round(self) -> None:
        kill = None
        if self._random.random() < 0.5:
            kill = self._random.choice(_CALLS), self._random.choice(_WHENS), int(self._random.expovariate(0.02)) + 1
        has_begun = self._context.Event()
        storer = self._context.Process(
            target=store_until_killed, args=(self._root, self._random.getrandbits(32), kill, has_begun, self._diary)
        )
        storer.start()
        assert has_begun.wait(PATIENCE_S)
        end = time.monotonic() + (3.0 if kill else self._random.expovariate(6))
        while time.monotonic() < end and storer.is_alive():
            if self._root.exists() and self._random.random() < 0.1:
                self._check_limit()
            time.sleep(0.005)
        self.tally.by_call += not storer.is_alive()
        storer.kill()
        storer.join()
        assert storer.exitcode == -signal.SIGKILL, storer.exitcode
        self.tally.kills += 1
        if self._random.random() < _LOST:
            lose_catalogue(self._root)
        self._recover()

    def _check_limit(self) -> None:
        num_bytes = bytes_under(self._root)
        self.tally.over_limit += num_bytes > CAPACITY
        self.tally.most_bytes = max(self.tally.most_bytes, num_bytes)

    def _recover(self) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        examiner = self._context.Process(target=examine, args=(self._root, theirs, self._diary))
        examiner.start()
        theirs.close()
        try:
            self.tally.add(ours.recv() if ours.poll(PATIENCE_S) else Tally(unreadable_starts=1))
        except EOFError:
            self.tally.unreadable_starts += 1
        examiner.join(PATIENCE_S)
        examiner.kill()
        ours.close()


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
