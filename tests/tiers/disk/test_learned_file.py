# SPDX-License-Identifier: Apache-2.0
"""``learned.json``: what eviction has learned outlives a process, and no file can make a start fail."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from tests.tiers.disk.inside import learned_of, served_namespace
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, OTHER_NAMESPACE, tier_pair
from tests.waiting import until
from vllm_overlay import versions
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.learned_file import check_learned, read_learned, write_learned
from vllm_overlay.tiers.disk.files.scan import namespaces_under
from vllm_overlay.tiers.policies.reuse import Learned, ReuseModel

PRIOR = ReuseModel().learned()
KNOWN = Learned([[2 * rate for rate in rates] for rates in PRIOR.rates], PRIOR.factors)
WORDS = {"version": versions.LEARNED, "learned": {"rates": KNOWN.rates, "factors": KNOWN.factors}}


@pytest.fixture
def root(tmp_path) -> Path:
    """With a directory of the namespace."""
    (tmp_path / NAMESPACE.attention).mkdir(mode=0o700)
    return tmp_path


def file_in(root: Path, fingerprint: str = NAMESPACE.attention) -> Path:
    return root / fingerprint / "learned.json"


def put(root: Path, content: bytes, mode: int = 0o600) -> None:
    file_in(root).write_bytes(content)
    file_in(root).chmod(mode)


def changed(*path: object, to: object) -> bytes:
    """The words, with another value in that place."""
    words = json.loads(json.dumps(WORDS))
    place = words
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return json.dumps(words).encode()


def test_what_was_written_is_read_and_nobody_else_can_write_it(root):
    write_learned(Device(), str(root), NAMESPACE.attention, KNOWN)
    assert read_learned(str(root), NAMESPACE.attention) == KNOWN
    assert stat.S_IMODE(file_in(root).stat().st_mode) == 0o600
    assert os.listdir(root / NAMESPACE.attention) == ["learned.json"]


def test_without_a_file_nothing_is_known_and_nothing_is_said(root, said):
    assert read_learned(str(root), NAMESPACE.attention) is None
    assert read_learned(str(root), OTHER_NAMESPACE.attention) is None
    assert said() == []


HOSTILE = {
    "empty": b"",
    "no JSON": b"{",
    "no object": b"[" * 9000,
    "no text": b"\xff",
    "too large": json.dumps(WORDS).encode() + b" " * (1 << 14),
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


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_damaged_or_foreign_file_is_a_line_in_the_log_and_nothing_is_known(root, said, content):
    put(root, content)
    assert read_learned(str(root), NAMESPACE.attention) is None
    assert ["learned.json" in message for message in said()] == [True]


def test_numbers_at_their_bounds_work(root):
    put(root, changed("learned", "rates", to=[[1e-12] * 24, [1e12] * 24, [1.0] * 24, [1e-12, 1e12] * 12]))
    known = read_learned(str(root), NAMESPACE.attention)
    model = ReuseModel(known, num_watched=16, refit_after=4)
    for place in range(12):
        model.end(0, model.begin(0, (0, 0, 0, 0), float(place)), place + 0.5)
    assert all(0 <= model.worth(role, model.level((0, 0, 0, 0)), 9.0) < 1e14 for role in range(4))


def test_a_file_that_others_may_have_written_is_not_believed(root):
    put(root, json.dumps(WORDS).encode(), mode=0o660)
    with pytest.raises(ValueError, match="others may write it"):
        check_learned(str(root), str(root / NAMESPACE.attention))


def test_a_link_a_pipe_and_a_directory_are_not_read(root):
    elsewhere = root / "elsewhere"
    elsewhere.write_bytes(json.dumps(WORDS).encode())
    for make in (lambda: file_in(root).symlink_to(elsewhere), lambda: os.mkfifo(file_in(root), 0o600)):
        make()
        assert read_learned(str(root), NAMESPACE.attention) is None
        file_in(root).unlink()
    file_in(root).mkdir()
    assert read_learned(str(root), NAMESPACE.attention) is None


class Full(Device):
    """Takes no byte."""

    def pwritev(self, fd, segments, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_file_of_before_and_no_temporary(root, said):
    put(root, json.dumps(WORDS).encode())
    write_learned(Full(), str(root), NAMESPACE.attention, PRIOR)
    assert read_learned(str(root), NAMESPACE.attention) == KNOWN
    assert os.listdir(root / NAMESPACE.attention) == ["learned.json"]
    assert said("has no new learned.json")


def test_a_tier_starts_with_what_was_learned_and_writes_it_at_its_end(tmp_path):
    with tier_pair(tmp_path / "root", eviction_policy="learned") as made:
        assert learned_of(made.tier) == PRIOR
        made.store(chain("p", 1))
    assert read_learned(str(made.root), NAMESPACE.attention) == PRIOR
    put(made.root, json.dumps(WORDS).encode())
    with tier_pair(made.root, eviction_policy="learned") as again:
        assert learned_of(again.tier) == KNOWN
        file_in(made.root).unlink()
    assert read_learned(str(made.root), NAMESPACE.attention) == KNOWN


def test_a_tier_writes_it_from_time_to_time(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_overlay.tiers.disk.ranking.LEAST_S", 0.0)
    monkeypatch.setattr("vllm_overlay.tiers.disk.ranking.MOST_S", 0.0)
    with tier_pair(tmp_path / "root", eviction_policy="learned") as made:
        made.store(chain("p", 1))
        until(lambda: made.tier.advance() or file_in(made.root).exists(), "a file")


def test_a_tier_that_evicts_by_last_use_neither_reads_nor_writes_it(tmp_path, said):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 1))
    assert not file_in(made.root).exists()
    put(made.root, b"{")
    with tier_pair(made.root):
        pass
    assert said("learned.json") == []


def test_a_reset_goes_on_with_what_was_learned_and_leaves_the_file_to_the_next_start(tmp_path):
    with tier_pair(tmp_path / "root", eviction_policy="learned") as made:
        made.store(chain("p", 1))
    put(made.root, json.dumps(WORDS).encode())
    with tier_pair(made.root, eviction_policy="learned") as made:
        before = made.tier.index
        made.tier.clear()
        assert made.tier.index is not before
        assert learned_of(made.tier) == KNOWN
        until(lambda: made.tier.advance() or served_namespace(made.tier) != NAMESPACE, "a reset")
    assert read_learned(str(made.root), NAMESPACE.attention) == KNOWN
    assert set(namespaces_under(str(made.root))) == set(NAMESPACE.fingerprints)


def test_a_namespace_that_goes_takes_the_file_with_it(tmp_path):
    with tier_pair(tmp_path / "root", eviction_policy="learned") as made:
        made.store(chain("p", 1))
        made.tier.drop(chain("p", 1)[0].object_id)
        made.settled()
    assert file_in(made.root).exists()
    with tier_pair(made.root, namespace=OTHER_NAMESPACE) as other:
        other.recovered()
        other.tier.clear()
        until(lambda: other.tier.advance() or not (made.root / NAMESPACE.attention).exists(), "the directory's end")
