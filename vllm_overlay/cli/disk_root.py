# SPDX-License-Identifier: Apache-2.0
"""What the commands that look after a disk root have in common."""

import argparse
import os

from vllm_overlay.config import ConfigError


def add_root_arguments(parser: argparse.ArgumentParser) -> None:
    """ROOT, ``--integrity-key-file``, ``--encryption-key-file`` and ``--json``."""
    parser.add_argument("root", metavar="ROOT", help="the `root` of the disk tier's settings")
    parser.add_argument(
        "--integrity-key-file", default="", metavar="FILE", help="the `integrity_key_file` of the tier's settings"
    )
    parser.add_argument(
        "--encryption-key-file", default="", metavar="FILE", help="the `encryption_key_file` of the tier's settings"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def require_owner(root: str) -> None:
    """Files that another user makes under a root would lock its owner out.

    Raises:
        ConfigError: this process runs as another user than the root's owner.
        OSError: the root cannot be read.
    """
    owner = os.stat(root).st_uid
    if owner != os.geteuid():
        raise ConfigError(f"{root} belongs to user {owner}: run this as that user")
