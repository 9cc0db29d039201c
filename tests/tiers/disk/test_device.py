# SPDX-License-Identifier: Apache-2.0
"""Temporaries: their names, and that a failed write leaves none."""

import pytest

from vllm_overlay.tiers.disk.files.device import Device, replace_file, temporary_name, writer_is_alive


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_a_small_file_that_cannot_be_written_stays_as_it_was_and_leaves_no_temporary(tmp_path, error):
    class Failing(Device):
        def pwritev(self, fd, segments, offset):
            raise error("a defect")

    path = tmp_path / "words"
    path.write_bytes(b"before")
    with pytest.raises(error):
        replace_file(Failing(), str(path), b"after")
    assert [(each, each.read_bytes()) for each in tmp_path.iterdir()] == [(path, b"before")]


def test_a_name_tells_whether_its_writer_lives():
    name = temporary_name()
    assert writer_is_alive(name)
    assert temporary_name() != name
    space, pid, start, count = name.removeprefix(".tmp.").split(".")
    for other in (
        f"{space}.99999999.1.2",
        f"{space}.{pid}.1.2",
        f"{space}.{pid}..2",
        f"{space}.²..1",
        f"{pid}.1.2",
        "",
    ):
        assert not writer_is_alive(f".tmp.{other}")
    for place in ("00000000", "ffffffff"):  # another host's, container's or boot's: nobody here can say
        assert writer_is_alive(f".tmp.{place}.{pid}.{start}.{count}") is None
