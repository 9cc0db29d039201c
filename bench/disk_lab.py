# SPDX-License-Identifier: Apache-2.0
"""What measurements of the disk tier share: a namespace, prompts, both halves of a tier, and a place to work in."""

import argparse
import contextlib
import hashlib
import itertools
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.settings import DiskTierSettings
from vllm_overlay.tiers.disk.worker import DiskTierWorker
from vllm_overlay.tiers.memory import unit_size

NAMESPACE = DiskNamespace("a" * 64, "b" * 64, {"model": "a measurement"})
CHUNK_TOKENS = 64


def prompts(num_bytes: int, num_chunks: int = 100, part: int = 0) -> Iterator[PlannedObject]:
    """Chains of ``num_chunks`` chunks of ``num_bytes`` each, parents first, for ever.

    No two parts have a name in common.
    """
    parents: tuple[ObjectId, ...] = ()
    for number in itertools.count():
        place = number % num_chunks
        start = place * CHUNK_TOKENS
        object_id = ObjectId("f0", hashlib.sha256(b"%d %d" % (part, number)).digest())
        yield PlannedObject(object_id, parents if place else (), start, start + CHUNK_TOKENS, num_bytes, 0)
        parents = (object_id,)


def halves(settings: DiskTierSettings, object_bytes: int) -> tuple[DiskTierManager, DiskTierWorker]:
    """Of a tier for one rank and objects of one size."""
    manager = DiskTierManager(settings, NAMESPACE, 1, object_bytes)
    return manager, DiskTierWorker(settings, NAMESPACE, 0, 1, unit_size(object_bytes), object_bytes)


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--directory", type=Path, default=Path(".benchmarks"), help="default: %(default)s")
    return made


@contextlib.contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """A new directory there, removed at the end. The tier logs errors alone meanwhile."""
    logging.getLogger("vllm_overlay").setLevel(logging.ERROR)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as made:
        yield Path(made)
