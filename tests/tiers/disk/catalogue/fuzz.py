# SPDX-License-Identifier: Apache-2.0
"""Catalogues that somebody changed: every operation answers or raises Damaged."""

import argparse
import contextlib
import itertools
import random
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import (
    MANY,
    MODEL,
    NOW,
    OTHERS,
    SNAPSHOT,
    Engine,
    files,
    object_id,
    stored,
    writer_name,
)
from vllm_overlay.tiers.disk.catalogue import (
    Catalogue,
    Damaged,
    FellBehind,
    File,
    Garbage,
    Limits,
    Scored,
    StoredObject,
    Superseded,
    schema,
)
from vllm_overlay.tiers.disk.catalogue.generations import path_of
from vllm_overlay.tiers.disk.catalogue.rows import MAX_BYTES

MINE = MODEL.fingerprint
ONE, DYING = writer_name(1), writer_name(2)
CHUNKS = [object_id(number) for number in range(200)]
PAGE = 4096
VALUES = (
    "NULL", "-1", "0", "1", "7", "2147483648", "4611686018427387905", "-9223372036854775808", "9223372036854775807",
    "9e999", "-9e999", "1e300", "0.5", "''", "'x'", "'f0'", "'f0' || char(10)", "x''", "x'00'", "zeroblob(70)",
    "CAST(x'ff' AS TEXT)", "printf('%.*c', 64, 'A')",
)  # fmt: skip
HUGE = ("zeroblob(2000000)", "printf('%.*c', 2000000, 'a')")
"""In a few rows: in all of them they would make a file of 600 MB, and nothing else that differs."""
COLUMNS = {
    "meta": ("is_complete", "actor", "num_bytes", "num_objects", "newest_use"),
    "namespace": ("id", "fingerprint", "words", "learned", "is_private"),
    "writer": ("id", "namespace", "granted"),
    "object": (
        "id", "namespace", "kind", "key", "writer", "number", "world_size", "num_bytes", "payload_bytes",
        "start_tokens", "end_tokens", "last_use", "score", "score_expiry", "num_children",
    ),
    "parent": ("child", "position", "parent"),
    "garbage": ("writer", "number", "world_size", "num_bytes", "collector"),
    "change": ("seq", "namespace", "is_added", "object", "kind", "key", "writer", "number"),
    "sqlite_sequence": ("name", "seq"),
}  # fmt: skip


def make(root: Path) -> None:
    """A catalogue with something in every table, in one file."""
    one, dying = Engine(root, name=ONE), Engine(root, OTHERS, name=DYING)
    one.store(one.stored(0), *(one.stored(number, (number // 2,)) for number in range(1, 200)))
    one.store(*(one.stored(number, (number, number + 1), kind=SNAPSHOT) for number in range(100, 120)))
    dying.store(*(dying.stored(number, last_use=NOW - number) for number in range(30)))
    one.catalogue.publish_scores(
        MINE, [Scored(CHUNKS[number], float(NOW), NOW) for number in range(150, 170)], NOW + 10
    )
    one.catalogue.keep_learned(MINE, b"learned")
    dying.evict(Limits(MANY, 5), NOW)
    dying.grant(50_000, 50_000)
    dying.close()
    one.catalogue.leave(one.name)
    one.close()


def with_log(root: Path) -> tuple[bytes, bytes]:
    """The file and its write-ahead log, as a process that is killed leaves them."""
    path = Path(path_of(str(root), 1))
    one = Engine(root)
    one.store(*(one.stored(number, (number - 100,)) for number in range(200, 300)))
    one.catalogue.touch(MINE, map(object_id, range(300)), NOW + 5)
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
    """Wrong values, which a CHECK would keep out, and no trigger follows."""
    db = sqlite3.connect(path, isolation_level=None)
    db.create_function("chance", 0, draw.random)
    db.execute("PRAGMA ignore_check_constraints = ON")
    for name in schema.TRIGGERS:
        db.execute(f"DROP TRIGGER {name}")
    for _ in range(draw.choice((1, 1, 3))):
        table = draw.choice(sorted(COLUMNS))
        column = draw.choice(COLUMNS[table])
        value = draw.choice((*VALUES, *HUGE, f"(SELECT {column} FROM {table} ORDER BY chance() LIMIT 1)"))
        many = 9 if value in HUGE else 999
        key = f"(SELECT {COLUMNS[table][0]} FROM {table} ORDER BY chance() LIMIT {draw.choice((1, many))})"
        with contextlib.suppress(sqlite3.Error):
            db.execute(f"UPDATE OR REPLACE {table} SET {column} = {value} WHERE {COLUMNS[table][0]} IN {key}")
        if draw.random() < 0.2:
            with contextlib.suppress(sqlite3.Error):
                db.execute(f"DELETE FROM {table} WHERE {COLUMNS[table][0]} IN {key}")
    for name, body in schema.TRIGGERS.items():
        db.execute(f"CREATE TRIGGER {name} {body}")
    db.close()


# What is done with it.


def operations(catalogue: Catalogue) -> list[Callable[[], object]]:
    """Everything that reads or writes."""
    new = [stored(number, (number // 2,), file=number + 5000, writer=ONE) for number in range(195, 210)]
    better = stored(7, (3,), file=7007, writer=ONE)
    return [
        lambda: catalogue.join(ONE, MODEL),
        lambda: within_bounds(list(catalogue.load(MINE)[1])),
        lambda: within_bounds(list(catalogue.load_all())),
        lambda: catalogue.changes_since(0, MINE),
        catalogue.totals,
        catalogue.writers,
        lambda: [catalogue.numbers_of(each) for each in (ONE, DYING)],
        lambda: catalogue.named([File(ONE, number) for number in range(200)]),
        lambda: catalogue.grant(ONE, 200_000, 8192, MANY),
        lambda: catalogue.commit(ONE, [*((item, None) for item in new), (better, File(ONE, 7))]),
        lambda: catalogue.touch(MINE, CHUNKS, NOW + 1),
        lambda: catalogue.publish_scores(MINE, [Scored(each, 1.5, NOW) for each in CHUNKS], NOW + 1),
        lambda: catalogue.choose_victims(Limits(MANY, 1000), NOW + 100),
        lambda: catalogue.collected(ONE, files(catalogue.evict(ONE, Limits(MANY, 100), NOW + 100)), 10_000, MANY),
        lambda: catalogue.collected(ONE, files(catalogue.garbage(ONE)), 10_000, MANY),
        lambda: catalogue.keep_learned(MINE, catalogue.learned(MINE) or b""),
        lambda: catalogue.join(ONE, OTHERS),
        lambda: catalogue.bury(DYING, ONE),
        catalogue.usage,
        lambda: adopted(catalogue),
        lambda: check(catalogue),
        lambda: catalogue.give_back(ONE, 1),
        lambda: catalogue.leave(ONE),
        lambda: within_bounds(list(catalogue.load(MINE)[1])),
    ]


def within_bounds(found: list[list[StoredObject]]) -> None:
    for item in itertools.chain(*found):
        assert 0 < item.num_bytes <= MAX_BYTES and len(item.file.writer) == 16 and item.file.number >= 0
        assert 0 < len(item.object_id.key) <= 64 and len(item.planned.parents) <= 8


def adopted(catalogue: Catalogue) -> None:
    """The first calls say that the rebuild has ended, unless the file says that it has not."""
    with contextlib.suppress(ValueError):
        catalogue.adopt([stored(number, writer=DYING) for number in range(3)])
        catalogue.discard([Garbage(File(DYING, 9000), 1, 1)])
    catalogue.end_rebuild()


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
            except Superseded as error:  # its row is lost
                if "join anew" not in str(error):
                    raise
                counts["refused"] += 1
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
        root.mkdir(mode=0o700)
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
