# SPDX-License-Identifier: Apache-2.0
"""Kills a process whose ``hybrid_disk`` tier stores, and reads all that another process has seen of it.

What could be found before the kill is restored after it, and no byte is wrong: by the process that saw it, and at the
end by one that starts anew.

The command: ``python -m tests.offloading.crash --kills 200 --seed 1`` (``make test SUITE=crash``).
"""

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.offloading.lent_rows import LentRows, alone, keys
from tests.waiting import until
from vllm_overlay.tiers.disk import bookkeeper

PROMPT_ROWS = 4
ROOT_BYTES = "4 GiB"
"""Nothing is evicted."""


def store_for_ever(root: str, life: int) -> None:
    """In the process that is to be killed. Four jobs are under way at any time."""
    alone()
    lent = LentRows(root, capacity_bytes=ROOT_BYTES)
    number = 0
    jobs: dict[int, int] = {}
    free = list(range(0, 4 * PROMPT_ROWS, PROMPT_ROWS))
    while True:
        while free:
            first = free.pop()
            rows = range(first, first + PROMPT_ROWS)
            for place, row in enumerate(rows):
                lent.rows[row] = content(life, number, place)
            jobs[lent.submit(keys(PROMPT_ROWS, f"{life} {number}"), rows, is_load=False)] = first
            number += 1
        free += [jobs.pop(result.job_id) for result in lent.step()]
        time.sleep(0.001)  # a step that never ends leaves the tier's threads no processor


def content(life: int, number: int, place: int) -> np.ndarray:
    return np.random.default_rng((life, number, place)).integers(0, 256, LentRows.row_bytes, dtype=np.uint8)


class Kills:
    """Rounds of storing and killing on one root, seen by a tier that lives on."""

    def __init__(self, root: Path, seed: int) -> None:
        self._root, self._random = str(root), random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.offloading.lent_rows"])
        self._reader = LentRows(self._root, capacity_bytes=ROOT_BYTES)
        self.seen: set[tuple[int, int]] = set()
        """Lives and the numbers of their prompts."""

    def round(self, life: int) -> None:
        storer = self._context.Process(target=store_for_ever, args=(self._root, life), daemon=True)
        storer.start()
        wanted = self._random.randrange(1, 12)
        until(lambda: len(self._all_found(life)) >= wanted, f"{wanted} prompts of life {life}")
        storer.kill()
        storer.join()
        found = self._all_found(life)
        self.check(self._reader, found)
        self.seen.update(found)

    def _all_found(self, life: int) -> list[tuple[int, int]]:
        """On a busy machine its first rows may wait longer for room than they can (``ROOM_S``), and are not stored."""
        return [(life, number) for number in range(100) if self._found(life, number)]

    def _found(self, life: int, number: int) -> bool:
        return all(map(self._reader.has, keys(PROMPT_ROWS, f"{life} {number}")))

    @staticmethod
    def check(lent: LentRows, prompts: list[tuple[int, int]]) -> None:
        for life, number in prompts:
            lent.rows[:PROMPT_ROWS] = 77
            result = lent.load(keys(PROMPT_ROWS, f"{life} {number}"), range(PROMPT_ROWS))
            assert result.success, f"prompt {number} of life {life} was found and is lost"
            for place in range(PROMPT_ROWS):
                assert (lent.rows[place] == content(life, number, place)).all(), f"wrong: {life} {number} {place}"

    def end(self) -> None:
        """Another start finds all of it."""
        self._reader.shutdown()
        lent = LentRows(self._root, capacity_bytes=ROOT_BYTES)
        until(lambda: lent.step() or not lent.tier._manager.is_recovering, "the end of the recovery")
        self.check(lent, sorted(self.seen))
        lent.shutdown()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.offloading.crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    alone()
    bookkeeper.TICK_S = 0.02  # the reader hears sooner of what is stored, and more kills take less time
    with tempfile.TemporaryDirectory() as scratch:
        kills = Kills(Path(scratch) / "root", options.seed)
        for life in range(options.kills):
            kills.round(life)
        kills.end()
        print(f"{options.kills} kills: {len(kills.seen)} prompts seen before them, all restored, none wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
