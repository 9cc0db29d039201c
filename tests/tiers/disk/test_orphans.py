# SPDX-License-Identifier: Apache-2.0
"""Files that the catalogue does not know, as a killed process leaves them."""

import errno
import shutil
import threading
import time

from tests.tiers.disk.devices import FailingDevice, Meanwhile, UnreadableFile
from tests.tiers.disk.files import bytes_under, counted, let_age, lose_catalogue, object_files, on_disk
from tests.tiers.disk.inside import catalogue_of, room_bytes
from tests.tiers.disk.objects import UNIT, chain
from tests.tiers.disk.prompts import GEOMETRY, KEYS, PLANNER, objects_of
from tests.tiers.disk.tier_pair import NAMESPACE, OTHER_NAMESPACE, tier_pair
from tests.tiers.integrity import check_integrity
from tests.waiting import until
from vllm_overlay.tiers.disk.catalogue import Catalogue, Name
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.disk.files.object_file import READ_ATTEMPTS
from vllm_overlay.tiers.disk.maintenance import recovery

WHOLE = objects_of(KEYS, [320, 640])
FIRST = PLANNER.chunk(KEYS, GEOMETRY.full[0], 0)


def forget(made, objects):
    """The catalogue does not know these objects any more; their files stay. Nobody has the root open."""
    catalogue = Catalogue(str(made.root))
    catalogue.join([], int(time.time()))
    names = [Name(made.namespace.fingerprint_of(item.object_id.tag), item.object_id) for item in objects]
    for removed in catalogue.remove(names):
        catalogue.end_removal([item.name for item in removed], 0, 0)
    catalogue.leave()
    catalogue.close()
    let_age(made.root)


def assert_found(made, objects):
    made.recovered()
    until(lambda: made.tier.advance() or all(made.coverage(objects)), "all that is on disk")
    until(lambda: counted(made.root)[0] == bytes_under(made.root), "what the catalogue counts")
    check_integrity(made.tier.index)


def test_whole_objects_are_adopted_whichever_was_written_first(tmp_path):
    """A window's chunk depends on the chunk of full attention that ends with it."""
    with tier_pair(tmp_path / "root") as made:
        made.store(WHOLE)
    forget(made, WHOLE)
    files = object_files(made.root)
    with tier_pair(made.root) as again:
        assert_found(again, WHOLE)
    assert object_files(made.root) == files


def test_snapshots_are_adopted_where_their_namespace_is_named_before_that_of_their_parents(tmp_path):
    namespace = DiskNamespace(NAMESPACE.snapshot, NAMESPACE.attention, {"model": "tiny"})
    with tier_pair(tmp_path / "root", namespace=namespace) as made:
        made.store(chain("p", 3))
    forget(made, chain("p", 3))
    files = object_files(made.root)
    with tier_pair(made.root, namespace=namespace) as again:
        assert_found(again, chain("p", 3))
    assert object_files(made.root) == files


def test_what_builds_on_a_file_that_cannot_be_read_stays_and_is_adopted_at_the_next_start(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(WHOLE)
    forget(made, WHOLE)
    files = object_files(made.root)
    device = UnreadableFile()
    device.fail(made.path(FIRST), errno.EIO)
    with tier_pair(made.root, device=device) as again:
        again.recovered()
        until(lambda: device.num_faults >= READ_ATTEMPTS)
        again.store(chain("q", 1))
    for planned in chain("q", 1):
        again.path(planned).unlink()
    assert object_files(made.root) == files
    with tier_pair(made.root) as third:
        third.recovered()
        until(lambda: third.tier.advance() or all(third.coverage(WHOLE)), "all that is on disk")


def test_what_builds_on_a_file_that_is_gone_is_removed(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 3))
    forget(made, chain("p", 3))
    made.path(chain("p", 3)[0]).unlink()
    with tier_pair(made.root) as again:
        until(lambda: object_files(made.root) == [], "a clean root")
        assert not any(again.recovered().coverage(chain("p", 3)))


def test_what_could_not_be_read_at_the_start_is_found_when_it_can_be(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery, "PAUSE_S", 0.3)
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 3))
    lose_catalogue(made.root)
    device = FailingDevice(preadv=errno.EIO)
    with tier_pair(made.root, device=device) as again:
        assert not any(again.recovered().coverage(chain("p", 3)))
        device.faults.clear()
        assert_found(again, chain("p", 3))


def put_large_orphan(root, num_units):
    """A file of another model, which no catalogue knows; returns its path and bytes."""
    large = chain("large", 1, num_units * UNIT)[0]
    changes = {"namespace": OTHER_NAMESPACE, "max_object_bytes": large.num_bytes, "staging_bytes": 200 * UNIT}
    with tier_pair(root.with_name("elsewhere"), **changes) as made:
        made.store([large])
    source = made.path(large)
    path = root / source.relative_to(made.root)
    path.parent.mkdir(parents=True, mode=0o700)
    shutil.move(source, path)
    let_age(root)
    return path, path.stat().st_size


def test_an_orphan_larger_than_half_the_capacity_goes_and_nothing_else_does(tmp_path):
    capacity = 12 * on_disk()
    with tier_pair(tmp_path / "root", capacity_bytes=capacity) as made:
        made.store(chain("p", 7))
    path, num_bytes = put_large_orphan(made.root, 60)
    assert num_bytes > capacity
    with tier_pair(made.root, capacity_bytes=capacity) as again:
        again.recovered()
        until(lambda: not path.exists(), "the end of the orphan")
        assert all(again.settled().coverage(chain("p", 7)))


def test_room_for_a_large_orphan_is_not_kept_once_it_is_adopted(tmp_path):
    capacity = 40 * on_disk()
    with tier_pair(tmp_path / "root", capacity_bytes=capacity) as made:
        made.store(chain("p", 35))
    path, num_bytes = put_large_orphan(made.root, 50)
    assert on_disk(50 * UNIT) == num_bytes < capacity // 2
    with tier_pair(made.root, capacity_bytes=capacity) as again:
        again.recovered()
        until(lambda: counted(made.root)[0] == bytes_under(made.root) and path.exists(), "its adoption")
        for turn in range(30):
            again.store(chain(f"q-{turn}", 1)[:1])
        again.settled()
        assert room_bytes(again.tier) < num_bytes // 2


def test_nothing_goes_for_an_orphan_that_another_process_removes_meanwhile(tmp_path):
    capacity = 40 * on_disk()
    with tier_pair(tmp_path / "root", capacity_bytes=capacity) as made:
        made.store(chain("p", 35))
    path, _ = put_large_orphan(made.root, 50)
    useless = path.with_name(path.name[:2] + "0" * 62 + path.name[64:])  # goes last of its namespace
    useless.write_bytes(bytes(8192))
    useless.chmod(0o600)
    device = Meanwhile(path, "close", path.unlink)
    let_age(made.root)
    with tier_pair(made.root, capacity_bytes=capacity, device=device) as again:
        until(lambda: not useless.exists(), "the end of the look around")
        assert device.has_acted.is_set()
        assert all(again.recovered().settled().coverage(chain("p", 35)))


def test_an_orphan_that_goes_as_it_is_adopted_is_never_promised(tmp_path, monkeypatch):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 1))
    forget(made, chain("p", 1))
    path, adopt, tried = made.path(chain("p", 1)[0]), Catalogue.commit, threading.Event()

    def commit(catalogue, batch, *is_there):
        path.unlink(missing_ok=True)
        result = adopt(catalogue, batch, *is_there)
        tried.set()
        return result

    monkeypatch.setattr(Catalogue, "commit", commit)
    with tier_pair(made.root) as again:
        again.recovered()
        until(tried.is_set, "its adoption")
        until(lambda: object_files(made.root) == [], "the end of what builds on it")
        again.settled()
        news = catalogue_of(again.tier).changes_since(0, NAMESPACE.fingerprints).changes
        assert len(news) == len(chain("p", 1)), "nothing came after forget()"
        assert counted(made.root)[0] == 0
