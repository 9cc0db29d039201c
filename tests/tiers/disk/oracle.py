# SPDX-License-Identifier: Apache-2.0
"""Whether a root is sound, read without the code that serves it: ``python -m tests.tiers.disk.oracle ROOT``.

Every row's files verify, every file has a row, a removal or a living writer, the counters are the sums, and all of it
is within the limit.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.files import bytes_under, object_files
from tests.tiers.disk.inside import reading
from vllm_overlay.tiers.disk.catalogue import Catalogue, StoredObject
from vllm_overlay.tiers.disk.files.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.files.format import HEADER_BYTES, FormatError, ObjectHeader, file_bytes
from vllm_overlay.tiers.disk.files.namespace import object_path


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
    said = header.fingerprint.hex(), header.planned, header.rank, header.world_size
    if said != (item.fingerprint, item.planned, rank, item.world_size):
        return f"is of another object: {said}"
    if len(raw) != file_bytes(header.payload_bytes):
        return f"has {len(raw)} bytes"
    payload = memoryview(bytearray(raw))[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    opening = integrity.open(header.seal.salt)
    opening.update(payload)
    if not opening.verify(header.seal.checksum) or any(raw[HEADER_BYTES + header.payload_bytes :]):
        return "has other bytes than were written"
    return ""


def _rows(catalogue: Catalogue) -> list[StoredObject]:
    _, slices = catalogue.load([known.fingerprint for known in catalogue.namespaces()])
    return list({item.name: item for found in slices for item in found}.values())


def _paths(root: Path, item: StoredObject) -> list[Path]:
    name = item.name
    return [Path(object_path(str(root), name.fingerprint, name.object_id, rank)) for rank in range(item.world_size)]


def _of_rows(catalogue: Catalogue, root: Path, integrity: Integrity) -> Iterator[str]:
    for item in _rows(catalogue):
        for rank, path in enumerate(_paths(root, item)):
            why = why_wrong(path, item, rank, integrity)
            if why and catalogue.find([item.name]) == [item]:  # else it has gone, or come anew, meanwhile
                yield f"{path} {why}"


def _of_files(catalogue: Catalogue, root: Path) -> Iterator[str]:
    there = object_files(root)
    known = {path for item in _rows(catalogue) for path in _paths(root, item)}
    with reading(catalogue) as db:
        going = {key.hex() for (key,) in db.execute("SELECT key FROM removal")}
    if catalogue.count_living():
        return
    for path in there:
        if path not in known and path.name.split(".")[0] not in going:
            yield f"{path} has no row"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    found = problems(parser.parse_args().root)
    print("\n".join(found) or "sound")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
