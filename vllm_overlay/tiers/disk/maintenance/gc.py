# SPDX-License-Identifier: Apache-2.0
"""Makes a root smaller by hand: leaves first, the oldest first, and nothing that a living process serves."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from vllm_overlay.tiers.disk.catalogue import BATCH_ROWS, Catalogue, Limits, Namespace, NamespaceUsage, RemovedObject
from vllm_overlay.tiers.disk.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.device import Device, remove_quietly
from vllm_overlay.tiers.disk.maintenance.catalogue_access import (
    joined,
    open_existing,
    open_or_begin,
    without_interruption,
)
from vllm_overlay.tiers.disk.maintenance.completion import adopt_all, complete
from vllm_overlay.tiers.disk.recognition import require_root
from vllm_overlay.tiers.disk.remover import Remover
from vllm_overlay.tiers.disk.scan import ORPHAN_AGE_S, FoundFile, was_written_before

_CLOCK_TICK_S = 0.05


@dataclass(slots=True)
class Collection:
    """Bytes and files of objects. ``in_use_bytes`` are those of namespaces that were left alone.

    ``bytes_after`` counts what others have stored meanwhile.
    """

    bytes_before: int = 0
    bytes_after: int = 0
    removed_bytes: int = 0
    removed_files: int = 0
    in_use_bytes: int = 0

    def count(self, removed: Iterable[RemovedObject]) -> None:
        for item in removed:
            self.removed_bytes += item.num_bytes
            self.removed_files += item.world_size


def collect(
    root: str,
    max_bytes: int,
    dry_run: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    device: Device | None = None,
    integrity: Integrity = XXH3,
) -> Collection:
    """Bring the objects under ``root`` down to ``max_bytes``, as far as namespaces that nobody serves allow.

    A catalogue that is missing or incomplete is rebuilt first; only that needs ``integrity``. Interrupted, it leaves no
    child without its parent that had one. Raises CatalogueError, ConfigError, OSError.
    """
    device = device or Device()
    kind = require_root(root)
    if dry_run:
        with _catalogue_to_ask(root, device, integrity) as catalogue:
            return _choose(catalogue, max_bytes)
    started = time.time()
    with joined(catalogue := open_or_begin(root, device, kind), root, device) as remover:
        useless = complete(catalogue, root, device, integrity)
        _remove_useless(catalogue, device, useless, started)
        return _remove(catalogue, remover, max_bytes, on_bytes)


def _remove(catalogue: Catalogue, remover: Remover, max_bytes: int, on_bytes: Callable[[int, int], None]) -> Collection:
    result = _begin(catalogue)
    surplus = result.bytes_before - max_bytes
    while (left := catalogue.totals().object_bytes - max_bytes) > 0:
        removed = catalogue.evict(Limits(left, BATCH_ROWS, only_idle=True), int(time.time()))
        if not removed:
            break
        remover.finish(removed)
        result.count(removed)
        on_bytes(result.removed_bytes, surplus)
    totals = catalogue.totals()
    result.bytes_after = totals.object_bytes + totals.removing_bytes
    return result


def _choose(catalogue: Catalogue, max_bytes: int) -> Collection:
    """What ``_remove`` would do."""
    result = _begin(catalogue)
    surplus = result.bytes_before - max_bytes
    if surplus > 0:
        limits = Limits(surplus, catalogue.totals().num_objects, only_idle=True)
        result.count(without_interruption(lambda: catalogue.choose_victims(limits, 0)))  # at 0 no score is too old
    result.bytes_after = result.bytes_before - result.removed_bytes
    return result


def _begin(catalogue: Catalogue) -> Collection:
    usages = without_interruption(catalogue.usage)
    return Collection(
        bytes_before=sum(usage.num_bytes for usage in usages),
        in_use_bytes=sum(usage.num_bytes for usage in usages if usage.is_served),
    )


def _remove_useless(catalogue: Catalogue, device: Device, useless: Iterable[FoundFile], started: float) -> None:
    """Files of which no object can be made, but for what others may be writing now."""
    is_alone = catalogue.count_living() == 1
    before = started - _CLOCK_TICK_S if is_alone else time.time() - ORPHAN_AGE_S
    for file in useless:
        if was_written_before(file, before):
            remove_quietly(device, file.path)


@contextlib.contextmanager
def _catalogue_to_ask(root: str, device: Device, integrity: Integrity) -> Iterator[Catalogue]:
    """The root's catalogue or, where that does not know all files, one that is made elsewhere and removed again."""
    with contextlib.ExitStack() as stack:
        catalogue = open_existing(root)
        if catalogue is not None:
            stack.enter_context(contextlib.closing(catalogue))
        if catalogue is None or not catalogue.totals().is_complete:
            served = _served(without_interruption(catalogue.usage)) if catalogue is not None else []
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-overlay-gc-"))
            catalogue = stack.enter_context(contextlib.closing(Catalogue(directory)))
            catalogue.join(served, int(time.time()))
            catalogue.begin_rebuild()
            adopt_all(catalogue, root, device, integrity)
        yield catalogue


def _served(usages: Iterable[NamespaceUsage]) -> list[Namespace]:
    return [Namespace(usage.fingerprint, usage.partner, usage.is_temporary) for usage in usages if usage.is_served]
