# SPDX-License-Identifier: Apache-2.0
"""A server's port is its own before it listens."""

import socket
from pathlib import Path

import pytest

from tools.server_process import ServerProcess, hold_port, port_of


def test_a_held_port_is_for_the_server_that_is_told_of_it() -> None:
    with hold_port() as holder, socket.socket() as stranger:
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port_of(holder)))
        address = ("127.0.0.1", port_of(holder))
        # As servers do, it sets SO_REUSEADDR.
        with socket.create_server(address) as server, socket.create_connection(address) as client:
            accepted, _ = server.accept()
            with accepted:
                client.sendall(b"heard")
                assert accepted.recv(5) == b"heard"


def test_a_server_holds_its_port_until_it_is_over(tmp_path: Path) -> None:
    process = ServerProcess([], log_path=tmp_path / "log")
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", int(process.url.rpartition(":")[2])))
    process.kill()
    assert process._holder is not None and process._holder.fileno() < 0
