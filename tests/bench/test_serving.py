# SPDX-License-Identifier: Apache-2.0
"""What the program takes, which servers it compares, and what its table says."""

from pathlib import Path

import pytest

from bench import serving_sides
from bench.http_load import Part, Served
from bench.scaled_trace import Reuse
from bench.serving import chosen_sides, parser
from bench.serving_outcome import Outcome, Plan, rows
from bench.serving_sides import NONE, OFFLOADING, OFFLOADING_FS, Side, Sizes, ours
from tests.engine.states import BFLOAT16, TOKEN_BYTES

SIZES = Sizes(device_blocks=48, cpu_bytes=1000, disk_bytes=5000)


def children(side: Side) -> list[dict]:
    config = side.transfer_config(SIZES, Path("root"))
    assert config is not None
    return [child["kv_connector_extra_config"] for child in config["kv_connector_extra_config"]["connectors"]]


def test_sizes_are_those_of_the_tiny_model():
    found = serving_sides.BLOCK_TOKENS, serving_sides.TOKEN_BYTES, serving_sides.SNAPSHOT_BYTES
    assert found == (BFLOAT16.block_size, TOKEN_BYTES, BFLOAT16.num_bytes)


def test_there_is_a_side_for_each_policy_and_each_other_after_the_one_without_a_connector():
    arguments = parser().parse_args(
        ["trace", "--policies", "lru", "learned", "--loading", "always", "--others", "offloading-fs"]
    )
    assert chosen_sides(arguments) == [NONE, *ours(["lru", "learned"], ["always"]), OFFLOADING_FS]
    names = [side.name for side in chosen_sides(parser().parse_args(["trace", "--others"]))]
    lru, learned = ("ours, lru", "ours, lru, loads always"), ("ours, learned", "ours, learned, loads always")
    assert names == ["no connector", *lru, *learned]


def test_a_policy_goes_to_both_tiers_and_all_sides_have_the_same_memory():
    side, always = ours(["learned"], ["measured", "always"])
    assert [child["eviction_policy"] for child in children(side)] == ["learned", "learned"]
    assert [child["capacity_bytes"] for child in children(side)] == [1000, 5000]
    assert [child["load_weight"] for child in children(side)] == ["auto", "auto"]
    assert [child["load_weight"] for child in children(always)] == [1.0, 0.9]
    theirs = OFFLOADING_FS.transfer_config(SIZES, Path("root"))
    assert theirs is not None and theirs["kv_connector_extra_config"]["cpu_bytes_to_use"] == 1000
    assert NONE.transfer_config(SIZES, Path("root")) is None


def test_lmcache_is_the_last_side_and_has_as_much_memory_and_as_many_bytes_of_device_cache():
    *_, other, side = chosen_sides(parser().parse_args(["trace", "--others", "offloading", "--lmcache", "unpacked"]))
    assert other == OFFLOADING and side.lmcache == str(Path("unpacked").resolve())
    sizes = Sizes(device_blocks=51, cpu_bytes=3 << 28, disk_bytes=0)
    assert (other.device_blocks(sizes), side.device_blocks(sizes)) == (51, 60)
    config = side.transfer_config(sizes, Path("root"))
    assert config is not None
    arguments = config["kv_connector_extra_config"]["lmcache.mp.autostart.server_args"].split()
    assert arguments[arguments.index("--l1-size-gb") + 1] == "0.75"
    assert arguments[arguments.index("--chunk-size") + 1] == str(side.block_tokens)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["trace", "--others", "lmcache"],
        ["trace", "--policies"],
        ["trace", "--loading", "never"],
        ["trace", "--load", "0"],
    ],
)
def test_arguments_that_cannot_work_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(argv)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def part(*first_tokens: float, seconds: float) -> Part:
    return Part(tuple(Served(one, one, 100, 60, 20) for one in first_tokens), (), seconds)


def test_a_row_compares_a_side_with_the_first_one():
    first = Outcome(NONE, [part(1.0, 2.0, seconds=4.0), part(3.0, seconds=4.0)], cpu_s=10.0)
    other = Outcome(OFFLOADING_FS, [part(0.5, 1.0, seconds=3.0), part(1.5, seconds=3.0)], cpu_s=12.0, external=120)
    plan = Plan((), 2, Reuse(300, 200, 0, 0), 1.0)
    _, row = rows([first, other], plan)
    assert row == (
        OFFLOADING_FS.name,
        *("120", "60", "90%", "1000 ms", "1500 ms", "0.50", "0.50 (0.50 to 0.50)", "0.50", "0.50 (0.50 to 0.50)"),
        *("60", "1.33 (1.33 to 1.33)", "12.0", "1.20", 0),
    )
