# SPDX-License-Identifier: Apache-2.0
"""Device code of one architecture stays in a library, and nothing moves."""

import struct

import pytest

from tools.fat_binary import MACHINE_CODE, MAGIC, PTX, keep_architecture


def container(*entries: tuple[int, int, bytes]) -> bytes:
    """Of (kind, architecture, payload)."""
    body = b"".join(
        struct.pack("<HHIQ12xI", kind, 1, 64, len(payload), architecture) + bytes(32) + payload
        for kind, architecture, payload in entries
    )
    return struct.pack("<4sHHQ", MAGIC, 1, 16, len(body)) + body


def payloads(library: bytes) -> list[bytes]:
    return [text for text in (b"old", b"own", b"new", b"ptx80", b"ptx100", b"alone") if text in library]


ALL = container(
    (MACHINE_CODE, 80, b"old"), (MACHINE_CODE, 90, b"own"), (MACHINE_CODE, 100, b"new"), (PTX, 80, b"ptx80")
)
LATER = container((MACHINE_CODE, 100, b"new"), (PTX, 90, b"alone"), (PTX, 100, b"ptx100"))


@pytest.mark.parametrize(("with_ptx", "kept"), [(False, [b"own"]), (True, [b"own", b"alone"])])
def test_own_machine_code_stays_and_ptx_where_there_is_none(with_ptx: bool, kept: list[bytes]) -> None:
    library = bytearray(b"head" + ALL + b"between" + LATER + b"tail")
    before = len(library)
    found = keep_architecture(library, 90, with_ptx=with_ptx)
    assert payloads(library) == kept
    assert found == {(MACHINE_CODE, 90): 3, **({(PTX, 90): 5} if with_ptx else {})}
    assert len(library) == before
    assert library.startswith(b"head" + MAGIC) and library.endswith(b"tail") and b"between" in library


def test_the_magic_in_something_else_is_passed_over() -> None:
    library = bytearray(b"text" + MAGIC + b"\xff" * 20 + ALL)
    keep_architecture(library, 90, with_ptx=False)
    assert payloads(library) == [b"own"]
    assert library.startswith(b"text" + MAGIC + b"\xff" * 20)


def test_a_library_without_device_code_is_left_alone() -> None:
    library = bytearray(b"nothing of the kind")
    assert not keep_architecture(library, 90, with_ptx=True)
    assert library == b"nothing of the kind"


def test_a_library_that_would_have_nothing_left_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing for sm_70"):
        keep_architecture(bytearray(ALL), 70, with_ptx=True)


def test_an_entry_that_does_not_fit_its_container_is_refused() -> None:
    broken = bytearray(container((MACHINE_CODE, 90, b"own")))
    struct.pack_into("<Q", broken, 16 + 8, 1000)
    with pytest.raises(ValueError, match="cannot be read"):
        keep_architecture(broken, 90, with_ptx=False)
