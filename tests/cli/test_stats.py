# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay stats``: whose objects lie under a root, of what kind, how many."""

import contextlib
import os
import socket
import time

import pytest

from tests.cli.commands import remove_catalogue, run
from tests.tiers.disk.file_systems import pretend
from tests.tiers.disk.files import bytes_under, on_disk
from tests.tiers.disk.foreign import contents_of
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, OTHER_NAMESPACE, tier_pair
from vllm_overlay import cli
from vllm_overlay.cli.console import age
from vllm_overlay.tiers.disk.catalogue import Catalogue
from vllm_overlay.tiers.disk.files import lease
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.lease import Lease
from vllm_overlay.tiers.disk.files.root import choose_root


def test_stats_say_whose_what_and_how_much(root, capsys):
    status, stats = run(capsys, "stats", root)
    assert status == 0
    assert stats["num_bytes"] == bytes_under(root) == 8 * on_disk()
    by_name = {namespace["fingerprint"]: namespace for namespace in stats["namespaces"]}
    assert set(by_name) == {NAMESPACE.fingerprint, OTHER_NAMESPACE.fingerprint}
    own = by_name[NAMESPACE.fingerprint]
    assert own["kinds"] == {"f0": [4, 4 * on_disk()], NAMESPACE.snapshot_kind: [1, on_disk()]}
    assert (own["model"], own["is_served"], own["is_private"]) == ("tiny", False, False)
    assert own["oldest_use"] <= own["newest_use"] <= time.time() + 1
    assert by_name[OTHER_NAMESPACE.fingerprint]["model"] == "another"


def test_stats_for_people_name_models_and_kinds(root, capsys):
    assert cli.main(["stats", str(root)]) == 0
    shown = capsys.readouterr().out
    for words in ("model tiny, served by nobody", "4 chunks of full attention group 0, ", "1 snapshots ("):
        assert words in shown


def test_stats_say_when_objects_were_used_last(root, capsys):
    chunks = [planned.object_id for planned in chain("p", 4)]
    with contextlib.closing(Catalogue(str(root))) as catalogue:
        catalogue.touch(NAMESPACE.fingerprint, map(NAMESPACE.stored_id, chunks), 3000)
        catalogue.touch(NAMESPACE.fingerprint, chunks[:1], 5000)
    _, stats = run(capsys, "stats", root)
    own = next(each for each in stats["namespaces"] if each["fingerprint"] == NAMESPACE.fingerprint)
    assert (own["oldest_use"], own["newest_use"]) == (3000, 5000)
    assert cli.main(["stats", str(root)]) == 0
    assert f"last used {age(5000)} ago, what goes first {age(3000)} ago" in capsys.readouterr().out


def test_stats_change_no_byte(root, capsys):
    before = contents_of(root)
    assert run(capsys, "stats", root)[0] == 0
    assert contents_of(root) == before


@pytest.mark.parametrize("kind", ["missing", "damaged", "anothers"])
def test_stats_without_a_catalogue_to_ask_say_so(root, capsys, kind):
    if kind == "damaged":
        (root / "catalogue-1.sqlite").write_bytes(b"garbage" * 1000)
    elif kind == "missing":
        remove_catalogue(root)
    elif os.geteuid():
        pytest.skip("only root can give a directory away")
    else:
        os.chown(root, 12345, 12345)
    before = set(root.rglob("*"))
    assert cli.main(["stats", str(root)]) == 2
    words = {"missing": "has no catalogue", "damaged": "cannot be asked", "anothers": "belongs to user 12345"}
    assert words[kind] in capsys.readouterr().err
    assert set(root.rglob("*")) == before


def test_stats_see_who_serves(root, capsys):
    with tier_pair(root) as made:
        made.recovered()
        _, stats = run(capsys, "stats", root)
    served = {namespace["fingerprint"] for namespace in stats["namespaces"] if namespace["is_served"]}
    assert served == {NAMESPACE.fingerprint}


def test_stats_open_nothing_that_another_machine_has(tmp_path, capsys, monkeypatch):
    """Its locks are not seen here, so what it is writing would look like what a killed one has left."""
    pretend(monkeypatch, tmp_path, "nfs4")
    for name in ("SETTLE_S", "_POLL_S"):
        monkeypatch.setattr(lease, name, 0.0)
    root = tmp_path / "root"
    with tier_pair(root, host_name="node-8") as made:
        made.store(chain("p", 1))
    Lease(Device(), choose_root(Device(), str(root), "node-8"), "another machine").take()
    with tier_pair(root, host_name="node-7") as made:
        made.store(chain("p", 1))
        made.settled()
        status, (own, others) = run(capsys, "stats", root)
    assert (status, own["num_bytes"]) == (0, 2 * on_disk())
    assert others == {"root": str(root / "host-node-8"), "served_by": socket.gethostname()}
    assert cli.main(["stats", str(root / "host-node-8"), "--verify", "--remove"]) == 1
    assert "run this there" in capsys.readouterr().out
