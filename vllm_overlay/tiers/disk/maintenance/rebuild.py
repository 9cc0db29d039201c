# SPDX-License-Identifier: Apache-2.0
"""Tells a new catalogue of everything that lies under its root, of whatever model."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import BATCH_ROWS, Catalogue, Namespace, StoredObject
from vllm_overlay.tiers.disk.files.listing import FoundObject, Listing, parents_first
from vllm_overlay.tiers.disk.files.manifest import manifest_or_empty
from vllm_overlay.tiers.disk.files.object_file import HeaderReader
from vllm_overlay.tiers.disk.files.scan import FoundFile, namespaces_under
from vllm_overlay.tiers.disk.maintenance.header_scan import HeaderScan

logger = logging.getLogger(__name__)


class Rebuild:
    """One rebuild.

    ``own`` says of namespaces where their parents lie. For others their ``namespace.json`` says it, or the place where
    a snapshot's parents are found. ``readers`` are those for a namespace, by its fingerprint.
    """

    def __init__(self, catalogue: Catalogue, root: str, scan: HeaderScan, own: Mapping[str, Namespace]) -> None:
        self._catalogue = catalogue
        self._root = root
        self._scan = scan
        self._own = own

    def run(self, own_readers: Sequence[HeaderReader], readers: Sequence[HeaderReader]) -> list[FoundFile]:
        """Adopt all objects that can be reached. Returns the files that are of no use to anybody.

        Nothing is of no use while something could not be read. Raises CatalogueError, OSError.
        """
        started = time.monotonic()
        found: dict[str, Listing] = {}
        for fingerprint in namespaces_under(self._root, is_strict=True):
            found[fingerprint] = self._scan.run(fingerprint, own_readers if fingerprint in self._own else readers)
        namespaces = {fingerprint: self._namespace(fingerprint, found) for fingerprint in found}
        now = int(time.time())
        self._catalogue.tell_of(namespaces.values(), now)
        count = 0
        useless = [file for listing in found.values() for file in listing.useless]
        reachable: defaultdict[str, set[ObjectId]] = defaultdict(set)
        by_partner = sorted(namespaces.values(), key=lambda namespace: namespace.fingerprint != namespace.partner)
        for namespace in by_partner:  # a snapshot's parents come first
            good, lost = parents_first(found[namespace.fingerprint].objects, reachable[namespace.partner])
            reachable[namespace.fingerprint].update(item.planned.object_id for item in good)
            self._adopt(namespace.fingerprint, good)
            count += len(good)
            useless += [file for item in lost for file in item.files]
        has_unread = any(listing.num_unread for listing in found.values())
        logger.info(
            "disk tier: recovered %d objects under %s in %.1f s; %d files belong to none",
            count, self._root, time.monotonic() - started, len(useless),
        )  # fmt: skip
        return [] if has_unread else useless

    def _adopt(self, fingerprint: str, found: Sequence[FoundObject]) -> None:
        for start in range(0, len(found), BATCH_ROWS):
            self._catalogue.adopt(as_stored(fingerprint, found[start : start + BATCH_ROWS]))

    def _namespace(self, fingerprint: str, found: Mapping[str, Listing]) -> Namespace:
        if (own := self._own.get(fingerprint)) is not None:
            return own
        manifest = manifest_or_empty(f"{self._root}/{fingerprint}")
        partner = manifest.attention or self._guess_partner(fingerprint, found)
        return Namespace(fingerprint, partner, is_temporary=manifest.is_of_one_process)

    def _guess_partner(self, fingerprint: str, found: Mapping[str, Listing]) -> str:
        """The namespace itself if any parent of its objects is there, else the one where most are. Some may be gone
        everywhere."""
        parents = {parent for item in found[fingerprint].objects for parent in item.planned.parents}

        def num_parents(candidate: str) -> int:
            return sum(item.planned.object_id in parents for item in found[candidate].objects)

        return fingerprint if num_parents(fingerprint) else max((fingerprint, *found), key=num_parents)


def as_stored(fingerprint: str, found: Iterable[FoundObject]) -> Iterator[StoredObject]:
    """The objects as the catalogue keeps them. Their files' times are all that is known of their last use."""
    now = int(time.time())
    for item in found:
        last_use = max(0, min(now, int(item.mtime)))
        yield StoredObject(fingerprint, item.planned, len(item.files), item.num_bytes, 0, last_use)
