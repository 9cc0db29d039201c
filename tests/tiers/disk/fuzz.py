# SPDX-License-Identifier: Apache-2.0
"""Changes whole files at random, and loads them.

The command: ``python -m tests.tiers.disk.fuzz --mutations 10000 --seed 1`` (``make test SUITE=crash``).
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.tiers.disk.files import on_disk
from tests.tiers.disk.keys import make_key
from tests.tiers.disk.objects import OBJECT, UNIT, chain
from tests.tiers.disk.tier_pair import TierPair
from vllm_overlay.tiers.disk.files.checksum import XXH3, integrity_of
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.format import ObjectHeader
from vllm_overlay.tiers.disk.files.object_file import BadObject, read_header

PLACES = {
    "magic": (0, 8), "version": (8, 12), "header length": (12, 16), "payload bytes": (16, 24), "start": (24, 32),
    "end": (32, 40), "number": (40, 48), "rank": (48, 52), "world size": (52, 56), "algorithm": (56, 57),
    "parents": (57, 58), "private": (58, 59), "zeros": (59, 64), "fingerprint": (64, 96), "payload checksum": (96, 112),
    "rest of payload checksum": (112, 128), "key id": (128, 136), "salt": (136, 168), "writer": (168, 176),
    "zeros before the names": (176, 192), "lengths of the name": (192, 194), "zeros of the name": (194, 200),
    "kind": (200, 224), "key": (224, 288), "parent": (288, 384), "unused parents": (384, 1056),
    "reserved": (1056, 4064),
    "header checksum": (4064, 4080), "rest of header checksum": (4080, 4096), "payload start": (4096, 4160),
    "payload middle": (4160, 4096 + OBJECT - 64), "payload end": (4096 + OBJECT - 64, 4096 + OBJECT),
    "padding": (4096 + OBJECT, on_disk()),
}  # fmt: skip

KINDS = ("", "encryption_key_file")
"""The setting that the files are written with: none, so with XXH3, or a key."""

_INTERESTING = [b"\x00", b"\x01", b"\xff", b"\x7f", b"\x80", b"/", b"..", b"\x00" * 8, b"\xff" * 8, b"\x00\x10\x00\x00"]


def flip(chosen: random.Random, raw: bytearray, place: int, others: list[bytes]) -> None:
    raw[place] ^= 1 << chosen.randrange(8)


def overwrite(chosen: random.Random, raw: bytearray, place: int, others: list[bytes]) -> None:
    value = chosen.choice([*_INTERESTING, chosen.randbytes(chosen.randrange(1, 5000))])
    raw[place : place + len(value)] = value[: len(raw) - place]


def insert(chosen: random.Random, raw: bytearray, place: int, others: list[bytes]) -> None:
    raw[place:place] = chosen.randbytes(chosen.choice([1, 7, 4096]))


def delete(chosen: random.Random, raw: bytearray, place: int, others: list[bytes]) -> None:
    del raw[place : place + chosen.choice([1, 7, 4096])]


def shift(chosen: random.Random, raw: bytearray, place: int, others: list[bytes]) -> None:
    """The length stays: what is taken out here comes in elsewhere."""
    taken = raw[place : place + chosen.randrange(1, 600)]
    del raw[place : place + len(taken)]
    elsewhere = chosen.randrange(len(raw)) if raw else 0
    raw[elsewhere:elsewhere] = taken


def truncate(chosen: random.Random, raw: bytearray, place: int, others: list[bytes]) -> None:
    del raw[place:]


def extend(chosen: random.Random, raw: bytearray, place: int, others: list[bytes]) -> None:
    raw += bytes(chosen.choice([1, 4096, UNIT]))


def splice(chosen: random.Random, raw: bytearray, place: int, others: list[bytes]) -> None:
    """The beginning of this file and the end of another one."""
    raw[place:] = chosen.choice(others)[place:]


def swap(chosen: random.Random, raw: bytearray, place: int, others: list[bytes]) -> None:
    raw[:] = chosen.choice(others)


def forge(chosen: random.Random, raw: bytearray, place: int, others: list[bytes]) -> None:
    """A hostile header: changed, and its checksum made to fit."""
    overwrite(chosen, raw, place % 4064, others)
    raw[4064:4096] = XXH3.header_checksum(bytes(raw[:4064])) + bytes(16)


MUTATIONS: list[Callable[[random.Random, bytearray, int, list[bytes]], None]] = [
    flip, overwrite, insert, delete, shift, truncate, extend, splice, swap, forge,
]  # fmt: skip


class Fuzz:
    """Changes one object's file again and again; its twin files are other objects of the same size."""

    def __init__(self, root: Path, seed: int, **keys: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._pair = TierPair(root, read_threads=1, **keys).recovered()
        self._integrity = integrity_of(keys.get(KINDS[1], ""))
        self._objects = chain("p", 3)
        self._pair.store(self._objects)
        self._pair.settled()
        self._target = self._objects[1]
        self._path = self._pair.path(self._target)
        self._good = self._path.read_bytes()
        self._others = [self._pair.path(planned).read_bytes() for planned in self._objects if planned != self._target]

    def round(self, place: str) -> None:
        """One to three mutations, the first of them in that class of bytes; then recover's read and a load."""
        raw = bytearray(self._good)
        position = self._random.randrange(*PLACES[place])
        names = []
        for _ in range(self._random.choice([1, 1, 1, 2, 3])):
            mutation = self._random.choice(MUTATIONS)
            mutation(self._random, raw, min(position, max(0, len(raw) - 1)), self._others)
            names.append(mutation.__name__)
            position = self._random.randrange(max(1, len(raw)))
            if not raw:
                break
        self._check(bytes(raw), "forge" in names)

    def _check(self, raw: bytes, is_forged: bool) -> None:
        self._path.unlink(missing_ok=True)
        self._path.write_bytes(raw)
        is_header_readable = self._has_header()
        (result,) = self._pair.fetch([self._target])  # compares the bytes with those that were stored
        self.outcomes[str(result.reason or "loaded")] += 1
        if result.reason:
            assert result.is_bad
        else:
            assert is_header_readable
            assert self._may_read(raw, is_forged)

    def _has_header(self) -> bool:
        """Whether the header verifies, for a recovery."""
        try:
            read_header(Device(), str(self._path), lambda page: ObjectHeader.decode(page, self._integrity))
        except BadObject as bad:
            assert bad.reason in ("header", "size")
            return False
        return True

    def _may_read(self, raw: bytes, is_forged: bool) -> bool:
        """Only what was stored; without a key also what somebody has forged."""
        return raw == self._good or (is_forged and self._integrity == XXH3)

    def close(self) -> None:
        self._pair.close()


def fuzz(root: Path, count: int, seed: int, kind: str = "") -> Counter[str]:
    """How the loads of ``count`` changed files ended; every class of bytes takes its turn. ``kind``: see ``KINDS``."""
    fuzz = Fuzz(root, seed, **({kind: make_key(root.with_name("key"))} if kind else {}))
    places = list(PLACES)
    for turn in range(count):
        fuzz.round(places[turn % len(places)])
    fuzz.close()
    return fuzz.outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    started = time.monotonic()
    count = arguments.mutations // len(KINDS)
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
            outcomes = fuzz(Path(directory) / "root", count, arguments.seed, kind)
        print(f"seed {arguments.seed}, {kind or 'no key'}, {count} mutations: {dict(outcomes)}", flush=True)
    print(f"{time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
