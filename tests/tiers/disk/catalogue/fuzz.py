# SPDX-License-Identifier: Apache-2.0
"""Catalogues that somebody changed: every operation answers or raises Damaged."""

import argparse
import contextlib
import random
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import (
    CHUNKS,
    NOW,
    OTHERS,
    SNAPSHOTS,
    loaded,
    member,
    name,
    names,
    store,
    stored,
)
from vllm_overlay.tiers.disk.catalogue import Catalogue, Damaged, FellBehind, Limits, Scored
from vllm_overlay.tiers.disk.catalogue.generations import path_of

MANY = 1 << 40
OURS = [CHUNKS.fingerprint, SNAPSHOTS.fingerprint]
PAGE = 4096
VALUES = (
    "NULL", "-1", "0", "1", "7", "2147483648", "4611686018427387905", "-9223372036854775808", "9223372036854775807",
    "9e999", "-9e999", "1e300", "0.5", "''", "'x'", "'f0'", "'f0' || char(10)", "x''", "x'00'", "zeroblob(70)",
    "zeroblob(2000000)", "CAST(x'ff' AS TEXT)", "printf('%.*c', 2000000, 'a')", "printf('%.*c', 64, 'A')",
)  # fmt: skip
COLUMNS = {
    "meta": ("generation", "is_complete", "rebuilder", "object_bytes", "num_objects"),
    "namespace": ("id", "fingerprint", "partner", "is_temporary", "served_at"),
    "object": (
        "id", "namespace", "tag", "key", "world_size", "num_bytes", "payload_bytes", "start_tokens", "end_tokens",
        "ticket", "last_use", "score", "score_expiry", "place", "num_children",
    ),
    "parent": ("child", "position", "parent"),
    "member": ("slot", "pid", "granted"),
    "serve": ("slot", "namespace"),
    "removal": ("namespace", "key", "tag", "slot", "world_size", "num_bytes"),
    "change": ("seq", "namespace", "is_added", "object", "tag", "key"),
    "sqlite_sequence": ("name", "seq"),
}  # fmt: skip


def make(root: Path) -> None:
    """A catalogue with something in every table, in one file."""
    one, dying = member(root, CHUNKS, SNAPSHOTS, OTHERS), member(root)
    store(one, stored(0), *(stored(number, (number // 2,)) for number in range(1, 200)))
    store(one, *(stored(number, (number, number + 1), SNAPSHOTS, tag="s") for number in range(100, 120)))
    store(dying, *(stored(number, (), OTHERS, last_use=NOW - number) for number in range(30)))
    one.publish_scores([Scored(name(number), float(NOW), NOW) for number in range(150, 170)], NOW + 10)
    dying.evict(Limits(MANY, 5), NOW)
    dying.grant(50_000, 50_000, MANY)
    dying.close()
    one.leave()
    one.close()


def with_log(root: Path) -> tuple[bytes, bytes]:
    """The file and its write-ahead log, as a process that is killed leaves them."""
    path = Path(path_of(str(root), 1))
    one = member(root)
    store(one, *(stored(number, (number - 100,)) for number in range(200, 300)))
    one.touch([name(number) for number in range(300)], NOW + 5)
    found = path.read_bytes(), path.with_name(f"{path.name}-wal").read_bytes()
    one.close()
    return found


# Ways to change the file.


def flip(raw: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 8, 100))):
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)


def flip_in_head(raw: bytearray, draw: random.Random) -> None:
    """The header of the file, or of a page: where its b-trees are described."""
    start = draw.choice((0, PAGE * draw.randrange(len(raw) // PAGE)))
    for _ in range(draw.choice((1, 4))):
        raw[start + draw.randrange(120)] = draw.randrange(256)


def cut(raw: bytearray, draw: random.Random) -> None:
    del raw[draw.choice((draw.randrange(len(raw)), PAGE * draw.randrange(len(raw) // PAGE))) :]


def swap(raw: bytearray, draw: random.Random) -> None:
    """One page becomes a copy of another."""
    one, other = (PAGE * draw.randrange(len(raw) // PAGE) for _ in range(2))
    raw[one : one + PAGE] = raw[other : other + PAGE]


def blank(raw: bytearray, draw: random.Random) -> None:
    start = PAGE * draw.randrange(len(raw) // PAGE)
    raw[start : start + PAGE] = bytes(PAGE) if draw.random() < 0.5 else draw.randbytes(PAGE)


BYTE_CHANGES: tuple[Callable[[bytearray, random.Random], None], ...] = (flip, flip_in_head, cut, swap, blank)


def change_rows(path: Path, draw: random.Random) -> None:
    """Wrong values where SQLite takes them: no column of its is typed."""
    db = sqlite3.connect(path, isolation_level=None)
    for _ in range(draw.choice((1, 1, 3))):
        table = draw.choice(sorted(COLUMNS))
        column = draw.choice(COLUMNS[table])
        key = f"(SELECT {COLUMNS[table][0]} FROM {table} ORDER BY random() LIMIT {draw.choice((1, 999))})"
        value = draw.choice((*VALUES, f"(SELECT {column} FROM {table} ORDER BY random() LIMIT 1)"))
        with contextlib.suppress(sqlite3.Error):
            db.execute(f"UPDATE OR REPLACE {table} SET {column} = {value} WHERE {COLUMNS[table][0]} IN {key}")
        if draw.random() < 0.2:
            with contextlib.suppress(sqlite3.Error):
                db.execute(f"DELETE FROM {table} WHERE {COLUMNS[table][0]} IN {key}")
    db.close()


# What is done with it.


def operations(catalogue: Catalogue) -> list[Callable[[], object]]:
    """Everything that reads or writes."""
    chunks = [stored(number, (number // 2,)) for number in range(195, 210)]
    return [
        lambda: catalogue.join([CHUNKS, SNAPSHOTS, OTHERS], NOW),
        lambda: [list(catalogue.load(each)[1]) for each in (OURS, [OTHERS.fingerprint])],
        lambda: catalogue.changes_since(0, OURS),
        lambda: catalogue.find([name(number) for number in range(200)]),
        catalogue.totals,
        catalogue.dead_members,
        lambda: catalogue.grant(200_000, 8192, MANY),
        lambda: catalogue.commit(chunks),
        lambda: catalogue.touch([name(number) for number in range(200)], NOW + 1),
        lambda: catalogue.publish_scores([Scored(name(number), 1.5, NOW) for number in range(200)], NOW + 1),
        lambda: catalogue.choose_victims(Limits(MANY, 1000), NOW + 100),
        lambda: catalogue.end_removal(names(catalogue.evict(Limits(MANY, 100), NOW + 100)), 10_000, MANY),
        lambda: list(catalogue.remove([name(1)])),
        lambda: [catalogue.bury(slot) for slot in (0, 1, 2, 3)],
        catalogue.usage,
        catalogue.begin_rebuild,
        catalogue.drop_empty_namespaces,
        lambda: check(catalogue),
        lambda: catalogue.give_back(1),
        catalogue.leave,
        lambda: loaded(catalogue),
    ]


def examine(root: Path, counts: Counter[str]) -> None:
    """Asserts by not catching what is neither an answer nor Damaged."""
    try:
        catalogue = Catalogue(str(root))
    except Damaged:
        counts["not opened"] += 1
        return
    try:
        for do in operations(catalogue):
            try:
                do()
                counts["answered"] += 1
            except (Damaged, FellBehind):
                counts["refused"] += 1
            except ValueError as error:
                if "call join first" not in str(error):
                    raise
    finally:
        catalogue.close()


def run(scratch: Path, mutations: int, seed: int) -> Counter[str]:
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    make(scratch / "whole")
    raw = Path(path_of(str(scratch / "whole"), 1)).read_bytes()
    beside, log = with_log(scratch / "whole")
    for number in range(mutations):
        root = scratch / "root"
        (root / "members").mkdir(parents=True, mode=0o700)
        path = Path(path_of(str(root), 1))
        kind = draw.choice(("bytes", "bytes", "rows", "rows", "log"))
        changed = bytearray(log if kind == "log" else raw)
        if kind != "rows":
            draw.choice(BYTE_CHANGES)(changed, draw)
        if kind == "log":
            path.write_bytes(beside)
            path.with_name(f"{path.name}-wal").write_bytes(changed)
        else:
            path.write_bytes(changed)
        if kind == "rows":
            change_rows(path, draw)
        try:
            examine(root, counts)
        except BaseException as error:
            error.add_note(f"mutation {number} of seed {seed}")
            raise
        shutil.rmtree(root)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=5000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(dict(run(Path(scratch), arguments.mutations, arguments.seed)))


if __name__ == "__main__":
    main()
