# SPDX-License-Identifier: Apache-2.0
"""Whether a root is sound, read without the code that serves it: ``python -m tests.tiers.disk.oracle ROOT``.

Every row's files verify, every file has a row, garbage or a living writer, the counters are the sums, and all of it
is within the limit.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.files import bytes_under, object_files, writers_of
from vllm_overlay.common.file_lock import is_held
from vllm_overlay.tiers.disk.catalogue import Catalogue, File, StoredObject
from vllm_overlay.tiers.disk.files.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.files.format import HEADER_BYTES, FormatError, ObjectHeader, file_bytes
from vllm_overlay.tiers.disk.files.writer import FILES_A_DIRECTORY, alive_path, parse_name, path_of


def problems(root: Path, capacity_bytes: int | None = None, integrity: Integrity = XXH3) -> list[str]:
    """One sentence each; none when all is well. What a living process does meanwhile is no problem."""
    with contextlib.closing(Catalogue(str(root))) as catalogue:
        if not catalogue.totals().is_complete:
            return ["the catalogue does not know all files"]
        found = check(catalogue)
        found += _of_rows(catalogue, root, integrity)
        found += _of_files(catalogue, root)
        if capacity_bytes is not None and (num_bytes := bytes_under(root)) > capacity_bytes:
            found.append(f"{num_bytes} bytes are there, and {capacity_bytes} may be")
        return found


def why_wrong(path: Path, item: StoredObject, rank: int, integrity: Integrity) -> str:
    """What is wrong with one rank's file of an object; empty when all of it is right."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    try:
        header = ObjectHeader.decode(raw[:HEADER_BYTES], integrity)
    except FormatError as error:
        return f"has no header: {error}"
    said = header.fingerprint.hex(), header.planned, header.file, header.rank, header.world_size
    if said != (item.fingerprint, item.planned, item.file, rank, item.world_size):
        return f"is of another object: {said}"
    if len(raw) != file_bytes(header.payload_bytes):
        return f"has {len(raw)} bytes"
    payload = memoryview(bytearray(raw))[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    if not integrity.unseal(header.seal, [payload]) or any(raw[HEADER_BYTES + header.payload_bytes :]):
        return "has other bytes than were written"
    return ""


def _rows(catalogue: Catalogue) -> list[StoredObject]:
    return [item for found in catalogue.load_all() for item in found]


def _paths(root: Path, file: File, world_size: int) -> list[Path]:
    return [Path(path_of(str(root), file, rank)) for rank in range(world_size)]


def _of_rows(catalogue: Catalogue, root: Path, integrity: Integrity) -> Iterator[str]:
    for item in _rows(catalogue):
        for rank, path in enumerate(_paths(root, item.file, item.world_size)):
            why = why_wrong(path, item, rank, integrity)
            if why and catalogue.named([item.file]):  # else it has gone meanwhile
                yield f"{path} {why}"


def _of_files(catalogue: Catalogue, root: Path) -> Iterator[str]:
    there = object_files(root)
    known = catalogue.named({file for path in there if (file := file_at(path)) is not None})
    living = {writer for writer in writers_of(root) if is_held(alive_path(str(root), writer))}
    for path in there:
        file = file_at(path)
        if file is None or (file.writer not in living and file not in known):
            yield f"{path} has no row"


def file_at(path: Path) -> File | None:
    """What a path stands for. None in a wrong place."""
    parsed = parse_name(path.name)
    if parsed is None or path.parent.name != str(parsed[0] // FILES_A_DIRECTORY):
        return None
    return File(path.parts[-3], parsed[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    found = problems(parser.parse_args().root)
    print("\n".join(found) or "sound")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
