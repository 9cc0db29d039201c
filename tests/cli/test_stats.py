# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay stats``: whose objects lie under a root, of what kind, how many."""

import time

from tests.cli.commands import run
from tests.tiers.disk.files import bytes_under, on_disk
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, OTHER_NAMESPACE, tier_pair
from vllm_overlay import cli


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
    assert [num_bytes for _, num_bytes in chunks["largest"]] == [on_disk()] * 4
    assert (root / chunks["largest"][0][0]).exists()
    assert by_name[OTHER_NAMESPACE.snapshot]["kinds"] == {"s": [1, 1, on_disk()]}


def test_stats_for_people_name_models_and_kinds(root, capsys):
    assert cli.main(["stats", str(root)]) == 0
    shown = capsys.readouterr().out
    for words in ("model tiny, served by nobody", "4 chunks of full attention group 0 in 4 files", "1 snapshots"):
        assert words in shown


def test_stats_see_who_serves(root, capsys):
    with tier_pair(root) as made:
        made.store(chain("new", 1))
        _, stats = run(capsys, "stats", root)
    served = {namespace["fingerprint"] for namespace in stats["namespaces"] if namespace["is_in_use"]}
    assert served == set(NAMESPACE.fingerprints)
