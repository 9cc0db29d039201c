# SPDX-License-Identifier: Apache-2.0
"""What eviction has learned outlives a process, in the catalogue, and nothing there can make a start fail."""

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from tests.tiers.disk.inside import is_serving_last, learned_of
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, tier_pair
from tests.waiting import until
from vllm_overlay import versions
from vllm_overlay.tiers.disk.catalogue import Catalogue
from vllm_overlay.tiers.disk.catalogue.generations import newest, path_of
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.root import choose_root
from vllm_overlay.tiers.disk.ranking import decode_learned, encode_learned, read_learned
from vllm_overlay.tiers.policies.reuse import Learned, ReuseModel

PRIOR = ReuseModel().learned()
KNOWN = Learned([[2 * rate for rate in rates] for rates in PRIOR.rates], PRIOR.factors)
WORDS = {"version": versions.LEARNED, "learned": {"rates": KNOWN.rates, "factors": KNOWN.factors}}


@pytest.fixture
def root(tmp_path) -> Path:
    """With an object of the namespace, which nobody serves now."""
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 1))
    return made.root


def put(root: Path, raw: bytes) -> None:
    with contextlib.closing(Catalogue(str(root))) as catalogue:
        catalogue.keep_learned(NAMESPACE.fingerprint, raw)


def kept(root: Path) -> Learned | None:
    return read_learned(choose_root(Device(), str(root)), NAMESPACE.fingerprint)


def changed(*path: object, to: object) -> bytes:
    """The words, with another value in that place."""
    words = json.loads(json.dumps(WORDS))
    place = words
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return json.dumps(words).encode()


def test_where_nothing_was_kept_nothing_is_known_and_nothing_is_said(root, said):
    assert kept(root) is None
    assert kept(root.with_name("new")) is None
    assert said() == []


HOSTILE = {
    "empty": b"",
    "no JSON": b"{",
    "no object": b"[" * 9000,
    "no text": b"\xff",
    "another version": changed("version", to=versions.LEARNED + 1),
    "a role too many": changed("learned", "rates", to=[*KNOWN.rates, KNOWN.rates[0]]),
    "an age too few": changed("learned", "rates", 0, to=KNOWN.rates[0][1:]),
    "a factor too few": changed("learned", "factors", to=KNOWN.factors[1:]),
    "a field too many": changed("learned", "more", to=1),
    "zero": changed("learned", "rates", 3, 23, to=0.0),
    "negative": changed("learned", "factors", 0, 0, to=-1.0),
    "huge": changed("learned", "rates", 0, 0, to=1e300),
    "tiny": changed("learned", "rates", 0, 0, to=1e-300),
    "infinite": changed("learned", "rates", 0, 0, to=float("inf")),
    "no number": changed("learned", "rates", 0, 0, to=float("nan")),
    "a word": changed("learned", "rates", 0, 0, to="1.0"),
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
def test_what_is_damaged_or_foreign_is_a_line_in_the_log_and_nothing_is_known(root, said, raw):
    put(root, raw)
    assert kept(root) is None
    assert ["what eviction has learned" in message for message in said()] == [True]


def test_a_damaged_catalogue_is_a_line_in_the_log_and_a_start_goes_on(root, said):
    with contextlib.closing(sqlite3.connect(path_of(str(root), newest(str(root))))) as db, db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        db.execute("UPDATE namespace SET learned = 'a word'")
    assert kept(root) is None
    assert len(said("what eviction has learned")) == 1
    with tier_pair(root, eviction_policy="learned") as made:
        made.recovered()
        assert learned_of(made.tier) == PRIOR
        assert made.reasons(chain("p", 1)) == ["", ""]


def test_numbers_at_their_bounds_work():
    known = decode_learned(changed("learned", "rates", to=[[1e-12] * 24, [1e12] * 24, [1.0] * 24, [1e-12, 1e12] * 12]))
    model = ReuseModel(known, num_watched=16, refit_after=4)
    for place in range(12):
        model.end(0, model.begin(0, (0, 0, 0, 0), float(place)), place + 0.5)
    assert all(0 <= model.worth(role, model.level((0, 0, 0, 0)), 9.0) < 1e14 for role in range(4))


def test_a_tier_starts_with_what_was_learned_and_keeps_it_at_its_end(tmp_path):
    with tier_pair(tmp_path / "root", eviction_policy="learned") as made:
        assert learned_of(made.tier) == PRIOR
        made.store(chain("p", 1))
    assert kept(made.root) == PRIOR
    put(made.root, encode_learned(KNOWN))
    with tier_pair(made.root, eviction_policy="learned") as again:
        again.recovered()
        assert learned_of(again.tier) == KNOWN
        put(made.root, encode_learned(PRIOR))
    assert kept(made.root) == KNOWN


def test_a_tier_keeps_it_from_time_to_time(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_overlay.tiers.disk.ranking.LEAST_S", 0.0)
    monkeypatch.setattr("vllm_overlay.tiers.disk.ranking.MOST_S", 0.0)
    with tier_pair(tmp_path / "root", eviction_policy="learned") as made:
        made.store(chain("p", 1))
        until(lambda: made.tier.advance() or kept(made.root) is not None, "what was learned")


def test_a_tier_that_evicts_by_last_use_neither_reads_nor_keeps_it(root, said):
    assert kept(root) is None
    put(root, b"{")
    with tier_pair(root) as made:
        made.recovered()
    assert said("what eviction has learned") == []
    with contextlib.closing(Catalogue(str(root))) as catalogue:
        assert catalogue.learned(NAMESPACE.fingerprint) == b"{"


def test_a_reset_goes_on_with_what_was_learned_and_leaves_it_to_the_next_start(root):
    put(root, encode_learned(KNOWN))
    with tier_pair(root, eviction_policy="learned") as made:
        made.recovered()
        before = made.tier.index
        made.tier.clear()
        assert made.tier.index is not before
        assert learned_of(made.tier) == KNOWN
        until(lambda: made.tier.advance() or is_serving_last(made.tier), "a reset")
    assert kept(root) == KNOWN
    with contextlib.closing(Catalogue(str(root))) as catalogue:
        assert [usage.fingerprint for usage in catalogue.usage()] == [NAMESPACE.fingerprint]


def test_a_namespace_that_has_no_object_and_that_nobody_serves_takes_it_along(tmp_path):
    with tier_pair(tmp_path / "root", eviction_policy="learned") as made:
        made.recovered()
    assert kept(made.root) is None
