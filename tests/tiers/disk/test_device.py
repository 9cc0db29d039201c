# SPDX-License-Identifier: Apache-2.0
"""The names of temporaries."""

from vllm_overlay.tiers.disk.files.device import temporary_name, writer_is_alive


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
