# SPDX-License-Identifier: Apache-2.0
"""A file that is not what was written is a miss: it is bad, and stays until its object is stored anew."""

import os

import pytest

from tests.tiers.disk.devices import RuledDevice, is_object
from tests.tiers.disk.objects import OBJECT, UNIT, chain
from tests.tiers.disk.oracle import problems
from tests.tiers.disk.tier_pair import tier_pair
from tests.waiting import until
from vllm_overlay.config import MIB
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.root import choose_root, takes_direct_io


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


HEADER_FIELDS = [
    0, 8, 12, 16, 24, 32, 40, 48, 52, 56, 57, 58, 64, 96, 128, 136, 168, 176, 192, 193, 200, 224, 288, 304, 1000, 4064,
    4080,
]  # fmt: skip
PAYLOAD = {"start": 4096, "middle": 4096 + OBJECT // 2, "end": 4096 + OBJECT - 1}
PADDING = {"start": 4096 + OBJECT, "end": 4096 + 3 * UNIT - 1}


@pytest.mark.parametrize("offset", HEADER_FIELDS)
def test_a_flipped_header_field_is_a_miss(tmp_path, offset):
    check_flipped(tmp_path, offset, "header")


@pytest.mark.parametrize("offset", [*PAYLOAD.values(), *PADDING.values()])
def test_a_flipped_payload_or_padding_byte_is_a_miss(tmp_path, offset):
    check_flipped(tmp_path, offset, "checksum")


def check_flipped(tmp_path, offset, reason):
    planned = chain("p", 2)[1]
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 2))
        flip(made.path(planned), offset)
        (result,) = made.fetch([planned])
        assert (result.reason, result.is_bad, result.buffer) == (reason, True, None)


@pytest.mark.parametrize("size", [0, 100, 4096, 8192, 4096 + 3 * UNIT - 1, 4096 + 3 * UNIT + 1, 4096 + 4 * UNIT])
def test_a_truncated_or_extended_file_is_a_miss(tmp_path, size):
    planned = chain("p", 1)[0]
    with tier_pair(tmp_path / "root") as made:
        made.store([planned])
        os.truncate(made.path(planned), size)
        (result,) = made.fetch([planned])
        assert (result.reason, result.is_bad, result.buffer) == ("size", True, None)


def test_what_lies_behind_a_file_is_seen_also_where_one_call_ends_before_it(tmp_path):
    planned = chain("p", 1, 511 * 4096)[0]
    with tier_pair(
        tmp_path / "root", unit_bytes=4096, max_object_bytes=planned.num_bytes, staging_bytes=MIB * 8
    ) as made:
        made.store([planned])
        assert made.reasons([planned]) == [""]
        os.truncate(made.path(planned), 512 * 4096 + 1)
        assert made.reasons([planned]) == ["size"]


def test_a_file_of_any_size_is_written_in_one_call_and_read_in_one(tmp_path):
    (first, planned), calls = chain("p", 1, 40 * MIB), []
    device = RuledDevice(lambda call, path: calls.append(call) if is_object(path) else None)
    sizes = {"unit_bytes": MIB, "max_object_bytes": planned.num_bytes, "staging_bytes": 80 * MIB}
    with tier_pair(tmp_path / "root", device=device, **sizes) as made:
        made.store([first])  # which makes the directory
        calls.clear()
        made.store([planned])
        assert made.reasons([planned]) == [""]
    assert calls == ["open", "pwritev", "close", "open", "preadv", "close"]


def test_what_was_wrong_is_stored_anew_and_right_and_its_file_goes(tmp_path):
    objects = chain("p", 2)
    with tier_pair(tmp_path / "root") as made:
        made.store(objects)
        bad = made.path(objects[0])
        flip(bad, PAYLOAD["middle"])
        (result,) = made.fetch(objects[:1])
        assert result.is_bad and bad.exists()
        made.tier.drop(objects[0].object_id)
        made.store(objects[:1])
        assert made.reasons(objects) == [""] * 3
        until(lambda: not bad.exists(), "the bad file's end")
        made.settled()
    assert problems(made.root) == []


def test_what_the_same_object_was_in_before_is_a_miss(tmp_path):
    planned = chain("p", 1)[0]
    with tier_pair(tmp_path / "root") as made:
        made.store([planned])
        before = made.path(planned).read_bytes()
        made.tier.drop(planned.object_id)
        made.store([planned])
        made.path(planned).write_bytes(before)
        assert made.reasons([planned]) == ["header"]


def test_the_file_of_another_rank_key_or_namespace_is_a_miss(tmp_path):
    planned, another = chain("p", 2)[:2]
    with tier_pair(tmp_path / "root", world_size=2) as made:
        made.store([planned, another])
        os.replace(made.path(planned, 1), made.path(another, 1))
        assert made.reasons([planned, another], rank=1) == ["missing", "header"]
        made.tier.drop(planned.object_id)
        made.store([planned])
        os.replace(made.path(planned, 1), made.path(planned, 0))
        assert made.reasons([planned], rank=0) == ["header"]
    with tier_pair(tmp_path / "a") as one, tier_pair(tmp_path / "b", world_size=2) as two:
        one.store([planned])
        two.store([planned])
        os.replace(one.path(planned), two.path(planned))
        assert two.reasons([planned]) == ["header"]


def test_an_object_of_another_size_is_a_miss(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 1, OBJECT))
        assert made.reasons(chain("p", 1, OBJECT - 1)) == ["header", "header"]
        assert made.reasons(chain("p", 1, UNIT)) == ["size", "size"]


def test_a_symlink_in_place_of_an_object_is_not_followed(tmp_path):
    planned = chain("p", 1)[0]
    with tier_pair(tmp_path / "root") as made:
        made.store([planned])
        target = tmp_path / "elsewhere"
        made.path(planned).rename(target)
        made.path(planned).symlink_to(target)
        (result,) = made.fetch([planned])
        assert (result.reason, result.is_bad) == ("header", True)
        before = made.path(planned)
        made.tier.drop(planned.object_id)
        made.store([planned])
        until(lambda: not before.is_symlink(), "the link's end")
        assert target.exists()


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_a_pipe_or_a_directory_in_place_of_an_object_holds_nobody(tmp_path, direct_io):
    if direct_io == "auto" and not takes_direct_io(Device(), choose_root(Device(), str(tmp_path / "root"))):
        pytest.skip("this file system has no O_DIRECT")
    one, two = chain("p", 2)[:2]
    with tier_pair(tmp_path / "root", direct_io=direct_io) as made:
        made.store([one, two])
        made.path(one).unlink()
        os.mkfifo(made.path(one))
        made.path(two).unlink()
        made.path(two).mkdir()
        assert made.reasons([one, two]) == ["header", "header"]
