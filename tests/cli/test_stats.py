# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay stats``: whose objects lie under a root, of what kind, how many."""

import os
import time

import pytest

from tests.cli.commands import member, names, remove_catalogue, run
from tests.tiers.disk.files import bytes_under, on_disk
from tests.tiers.disk.foreign import contents_of
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, OTHER_NAMESPACE, tier_pair
from vllm_overlay import cli
from vllm_overlay.cli.console import age


def test_stats_say_whose_what_and_how_much(root, capsys):
    status, stats = run(capsys, "stats", root)
    assert status == 0
    assert stats["num_bytes"] == bytes_under(root) == 8 * on_disk()
    by_name = {namespace["fingerprint"]: namespace for namespace in stats["namespaces"]}
    assert set(by_name) == {*NAMESPACE.fingerprints, *OTHER_NAMESPACE.fingerprints}
    chunks = by_name[NAMESPACE.attention]
    assert chunks["kinds"] == {"f0": [4, 4, 4 * on_disk()]}
    assert (chunks["model"], chunks["is_in_use"]) == ("tiny", False)
    assert chunks["oldest"] <= chunks["newest"] <= time.time()
    assert chunks["oldest_use"] <= chunks["newest_use"] <= time.time()
    assert [num_bytes for _, num_bytes in chunks["largest"]] == [on_disk()] * 4
    assert (root / chunks["largest"][0][0]).exists()
    assert by_name[OTHER_NAMESPACE.snapshot]["kinds"] == {"s": [1, 1, on_disk()]}


def test_stats_for_people_name_models_and_kinds(root, capsys):
    assert cli.main(["stats", str(root)]) == 0
    shown = capsys.readouterr().out
    for words in ("model tiny, served by nobody", "4 chunks of full attention group 0 in 4 files", "1 snapshots"):
        assert words in shown


def test_stats_say_when_objects_were_used_last(root, capsys):
    with member(root) as catalogue:
        catalogue.touch(names(chain("p", 4))[:4], 3000)
        catalogue.touch(names(chain("p", 4))[:1], 5000)
    _, stats = run(capsys, "stats", root)
    chunks = next(each for each in stats["namespaces"] if each["fingerprint"] == NAMESPACE.attention)
    assert (chunks["oldest_use"], chunks["newest_use"]) == (3000, 5000)
    assert cli.main(["stats", str(root)]) == 0
    assert f"last used {age(5000)} ago, what goes first {age(3000)} ago" in capsys.readouterr().out


def test_stats_change_no_byte(root, capsys):
    before = contents_of(root)
    assert run(capsys, "stats", root)[0] == 0
    assert contents_of(root) == before


@pytest.mark.parametrize("kind", ["missing", "damaged", "anothers"])
def test_stats_without_a_catalogue_to_ask_do_not_know_who_serves(root, capsys, kind):
    if kind == "damaged":
        (root / "catalogue-1.sqlite").write_bytes(b"garbage" * 1000)
    elif kind == "missing":
        remove_catalogue(root)
    elif os.geteuid():
        pytest.skip("only root can give a directory away")
    else:
        os.chown(root, 12345, 12345)
    before = set(root.rglob("*"))
    status, stats = run(capsys, "stats", root)
    assert (status, stats["num_bytes"]) == (0, 8 * on_disk())
    assert {(each["is_in_use"], each["newest_use"]) for each in stats["namespaces"]} == {(None, None)}
    assert cli.main(["stats", str(root)]) == 0
    assert "model tiny, unknown whether served" in capsys.readouterr().out
    assert set(root.rglob("*")) == before


def test_stats_see_who_serves(root, capsys):
    with tier_pair(root) as made:
        made.recovered()
        _, stats = run(capsys, "stats", root)
    served = {namespace["fingerprint"] for namespace in stats["namespaces"] if namespace["is_in_use"]}
    assert served == set(NAMESPACE.fingerprints)
