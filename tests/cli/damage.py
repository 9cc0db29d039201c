# SPDX-License-Identifier: Apache-2.0
"""Ways in which an object's file can be wrong."""

import os
import shutil

from tests.cli.commands import path_of
from tests.tiers.disk.files import on_disk
from tests.tiers.disk.objects import OBJECT, chain
from tests.tiers.disk.tier_pair import OTHER_NAMESPACE


def flip(path, offset):
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def damage(root, kind):
    """Breaks the snapshot of "p" and returns its path."""
    path = path_of(root, chain("p", 4)[4])
    if kind in ("header", "payload", "padding"):
        flip(path, {"header": 17, "payload": 4096 + OBJECT - 1, "padding": 4096 + OBJECT}[kind])
    elif kind == "short":
        os.truncate(path, 4096 + 100)
    elif kind == "empty":
        os.truncate(path, 0)
    elif kind == "long":
        os.truncate(path, on_disk() + 4096)
    elif kind == "swapped":
        shutil.copy(path_of(root, chain("q", 2)[2], OTHER_NAMESPACE), path)
    elif kind == "link":
        path.rename(root.parent / "elsewhere")
        path.symlink_to(root.parent / "elsewhere")
    elif kind == "pipe":
        path.unlink()
        os.mkfifo(path)
    return path
