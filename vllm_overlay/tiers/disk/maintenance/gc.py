# SPDX-License-Identifier: Apache-2.0
"""Makes a root smaller by hand. Leaves go first, the oldest first, and nothing that a living process serves goes."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from vllm_overlay.tiers.disk.catalogue import BATCH_ROWS, Catalogue, Limits, Namespace, NamespaceUsage, RemovedObject
from vllm_overlay.tiers.disk.files.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.recognition import require_root
from vllm_overlay.tiers.disk.files.scan import ORPHAN_AGE_S, FoundFile, unlink_if_same, was_written_before
from vllm_overlay.tiers.disk.maintenance.catalogue_access import (
    count_members,
    joined,
    open_existing,
    open_or_begin,
    without_interruption,
)
from vllm_overlay.tiers.disk.maintenance.completion import adopt_all, complete
from vllm_overlay.tiers.disk.maintenance.remover import Remover

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

    def count_files(self, removed: Iterable[FoundFile]) -> None:
        for file in removed:
            self.removed_bytes += file.num_bytes
            self.removed_files += 1


def collect(
    root: str,
    max_bytes: int,
    dry_run: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    device: Device | None = None,
    integrity: Integrity = XXH3,
) -> Collection:
    """Bring the objects under ``root`` down to ``max_bytes``, as far as namespaces that nobody serves allow.

    A catalogue that is missing or incomplete is rebuilt first. Only that needs ``integrity``. Files of which no object
    can be made then go before objects. If it is interrupted, no child is left without a parent that it had. Raises
    CatalogueError, ConfigError, OSError.
    """
    device = device or Device()
    kind = require_root(root)
    if dry_run:
        with _catalogue_to_ask(root, device, integrity) as (catalogue, useless):
            return _choose(catalogue, useless, max_bytes)
    started = time.time()
    with joined(catalogue := open_or_begin(root, device, kind), root, device) as remover:
        useless = complete(catalogue, root, device, integrity)
        useless = _not_being_written(useless, started, is_alone=count_members(root) == 1)
        result = _begin(catalogue, useless)
        surplus = result.bytes_before - max_bytes
        useless_bytes = _remove_useless(remover, useless, surplus, result)
        _evict(catalogue, remover, max_bytes - useless_bytes, lambda: on_bytes(result.removed_bytes, surplus), result)
        totals = catalogue.totals()
        result.bytes_after = totals.object_bytes + totals.removing_bytes + useless_bytes
        return result


def _evict(
    catalogue: Catalogue, remover: Remover, max_bytes: int, on_batch: Callable[[], None], result: Collection
) -> None:
    while (left := catalogue.totals().object_bytes - max_bytes) > 0:
        removed = catalogue.evict(Limits(left, BATCH_ROWS, only_idle=True), int(time.time()))
        if not removed:
            return
        remover.finish(removed)
        result.count(removed)
        on_batch()


def _choose(catalogue: Catalogue, useless: Sequence[FoundFile], max_bytes: int) -> Collection:
    """What would be removed."""
    result = _begin(catalogue, useless)
    surplus = result.bytes_before - max_bytes
    result.count_files(_oldest(useless, surplus))
    if (left := surplus - result.removed_bytes) > 0:
        limits = Limits(left, catalogue.totals().num_objects, only_idle=True)
        result.count(without_interruption(lambda: catalogue.choose_victims(limits, 0)))  # at 0 no score is too old
    result.bytes_after = result.bytes_before - result.removed_bytes
    return result


def _begin(catalogue: Catalogue, useless: Sequence[FoundFile]) -> Collection:
    usages = without_interruption(catalogue.usage)
    return Collection(
        bytes_before=sum(usage.num_bytes for usage in usages) + sum(file.num_bytes for file in useless),
        in_use_bytes=sum(usage.num_bytes for usage in usages if usage.is_served),
    )


# Files of no object.


def _not_being_written(useless: Iterable[FoundFile], started: float, is_alone: bool) -> list[FoundFile]:
    """Files that are older than all that others may be writing now."""
    before = started - _CLOCK_TICK_S if is_alone else time.time() - ORPHAN_AGE_S
    return [file for file in useless if was_written_before(file, before)]


def _oldest(useless: Sequence[FoundFile], num_bytes: int) -> list[FoundFile]:
    """As many of the files as have ``num_bytes``, or all."""
    chosen = []
    for file in sorted(useless, key=lambda file: file.mtime):
        if num_bytes <= 0:
            break
        num_bytes -= file.num_bytes
        chosen.append(file)
    return chosen


def _remove_useless(remover: Remover, useless: Sequence[FoundFile], surplus: int, result: Collection) -> int:
    """Returns the bytes of those that stay."""
    gone = [file for file in _oldest(useless, surplus) if unlink_if_same(remover.device, file)]
    result.count_files(gone)
    return sum(file.num_bytes for file in useless) - sum(file.num_bytes for file in gone)


@contextlib.contextmanager
def _catalogue_to_ask(
    root: str, device: Device, integrity: Integrity
) -> Iterator[tuple[Catalogue, Sequence[FoundFile]]]:
    """The root's catalogue, and the files of no object.

    Where the catalogue does not know all files, one is made elsewhere and removed again.
    """
    started = time.time()
    with contextlib.ExitStack() as stack:
        catalogue = open_existing(root)
        if catalogue is not None:
            stack.enter_context(contextlib.closing(catalogue))
            if catalogue.totals().is_complete:
                yield catalogue, ()
                return
        served = _served(without_interruption(catalogue.usage)) if catalogue is not None else []
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-overlay-gc-"))
        made = stack.enter_context(contextlib.closing(Catalogue(directory)))
        made.join(served, int(time.time()))
        made.begin_rebuild()
        useless = adopt_all(made, root, device, integrity)
        yield made, _not_being_written(useless, started, is_alone=count_members(root) == 0)


def _served(usages: Iterable[NamespaceUsage]) -> list[Namespace]:
    return [Namespace(usage.fingerprint, usage.partner, usage.is_temporary) for usage in usages if usage.is_served]
