# SPDX-License-Identifier: Apache-2.0
"""The replay behind docs/composition.md: small traces whose answers one can work out by hand."""

import json
from pathlib import Path

import pytest

from bench import composition
from bench.composition_settings import SETTINGS, Setting, build
from bench.replay import MODELS, Load, Replay, ReplayTier, Served
from bench.replay_tiers import Admission, IndexShelf, OpenShelf, Shelf
from bench.trace import TraceError, TraceRequest, read_trace
from vllm_overlay.planner.objects import ObjectId

CHUNK = 512 * 20_480
SNAPSHOT = 63_000_000
STATES = MODELS["states"]


def request(*block_ids: int, at: float = 0.0, rest: int = 76, outputs: int = 500) -> TraceRequest:
    """A prompt of whole blocks and a rest that no block holds."""
    return TraceRequest(at, len(block_ids) * 512 + rest, outputs, block_ids)


def chunk_id(block_id: int) -> ObjectId:
    return ObjectId("f0", block_id.to_bytes(8, "little"))


def snapshot_id(block_id: int) -> ObjectId:
    return ObjectId("s", block_id.to_bytes(8, "little"))


def replay_of(cpu: Shelf, disk: Shelf, composes: bool = False, **admission: float) -> Replay:
    tiers: list[ReplayTier] = []
    replay = Replay(STATES, tiers, composes)
    tiers.append(ReplayTier(cpu, Admission(replay.clock, SNAPSHOT)))
    tiers.append(ReplayTier(disk, Admission(replay.clock, SNAPSHOT, **admission)))
    return replay


def restored(setting: Setting, cpu_bytes: int, requests: list[TraceRequest], composes: bool) -> list[int]:
    replay, before = build(setting, STATES, cpu_bytes, len(requests), composes)
    return [served.load.tokens for served in replay.run(requests, before)]


def test_turns_restore_the_prompt_before_and_siblings_find_a_junction_at_their_third() -> None:
    replay = replay_of(IndexShelf(None), IndexShelf(None))
    prompts = [request(1, 2), request(1, 2, 3, 4), request(1, 8), request(1, 9)]
    served = [replay.serve(prompt) for prompt in prompts]
    assert [one.load.tokens for one in served] == [0, 1024, 0, 512]
    assert served[1].load == Load(1024, cpu_bytes=2 * CHUNK + SNAPSHOT, disk_bytes=0)


def test_a_prompt_is_never_restored_as_a_whole() -> None:
    replay = replay_of(IndexShelf(None), IndexShelf(None))
    prompts = [request(1, 2, rest=0)] * 2
    assert [replay.serve(prompt).load.tokens for prompt in prompts] == [0, 512]


NEVER_IN_BOTH = next(setting for setting in SETTINGS if setting.name == "never in both")
INCLUSIVE = SETTINGS[0]
ROOM_FOR_TWO = 2 * CHUNK + SNAPSHOT
"""Of the CPU tier. The second prompt below pushes out the first one's state and last chunk, not its first chunk."""
AWAY_AND_BACK = [request(1, 2), request(7), request(1, 2)]


def test_composing_gains_where_each_object_is_in_one_tier_alone() -> None:
    assert restored(NEVER_IN_BOTH, ROOM_FOR_TWO, AWAY_AND_BACK, composes=False) == [0, 0, 0]
    assert restored(NEVER_IN_BOTH, ROOM_FOR_TWO, AWAY_AND_BACK, composes=True) == [0, 0, 1024]


@pytest.mark.parametrize(("setting", "keeps"), [("never in both", False), ("disk gets what CPU evicts", True)])
def test_what_comes_back_to_the_cpu_leaves_the_disk_or_stays(setting: str, keeps: bool) -> None:
    replay, before = build(next(s for s in SETTINGS if s.name == setting), STATES, ROOM_FOR_TWO, 3, True)
    list(replay.run(AWAY_AND_BACK, before))
    cpu, disk = (tier.shelf for tier in replay.tiers)
    assert cpu.has(chunk_id(2)) and disk.has(chunk_id(2)) is keeps


def test_composing_gains_no_token_where_the_disk_has_everything_but_spares_it_reads() -> None:
    assert restored(INCLUSIVE, ROOM_FOR_TWO, AWAY_AND_BACK, composes=False) == [0, 0, 1024]
    assert restored(INCLUSIVE, ROOM_FOR_TWO, AWAY_AND_BACK, composes=True) == [0, 0, 1024]
    loads = []
    for composes in (False, True):
        replay, before = build(INCLUSIVE, STATES, ROOM_FOR_TWO, 3, composes)
        loads.append(list(replay.run(AWAY_AND_BACK, before))[-1])
    assert loads[0].load == Load(1024, 0, 2 * CHUNK + SNAPSHOT)
    assert loads[1].load == Load(1024, CHUNK, CHUNK + SNAPSHOT)
    assert loads[0].composed == loads[1].composed == (loads[1].load,)


def test_a_load_is_a_use_in_the_child_that_it_is_taken_from() -> None:
    """The disk has room for two prompts. Its copy of the first is older unless a load has used it."""
    cpu_has_nothing = IndexShelf(CHUNK - 1)
    for disk_loads, kept in ((False, 2), (True, 1)):
        disk = IndexShelf(2 * (CHUNK + SNAPSHOT))
        replay = replay_of(cpu_has_nothing if disk_loads else IndexShelf(None), disk)
        for prompt in (request(1), request(2), request(1), request(3)):
            replay.serve(prompt)
        assert [block for block in (1, 2) if disk.has(snapshot_id(block))] == [kept]


def test_a_tier_that_is_emptied_is_empty_at_its_place_in_the_trace() -> None:
    prompts = [request(1)] * 4
    both = Setting("both", cpu_restarts=1, disk_restarts=1)
    assert restored(both, 10 * ROOM_FOR_TWO, prompts, composes=False) == [0, 512, 0, 512]
    assert restored(Setting("CPU", cpu_restarts=1), 10 * ROOM_FOR_TWO, prompts, composes=False) == [0, 512, 512, 512]


def test_an_object_is_written_at_its_nth_use_and_a_state_when_it_is_computed_again() -> None:
    disk = IndexShelf(None)
    replay = replay_of(IndexShelf(None), disk, nth_use=2)
    replay.serve(request(1, 2))
    assert len(disk.index) == 0
    replay.serve(request(1, 2, 3))
    assert [block for block in (1, 2, 3) if disk.has(chunk_id(block))] == [1, 2]
    assert not any(disk.has(snapshot_id(block)) for block in (1, 2, 3))


@pytest.mark.parametrize(("outputs", "num_chunks"), [(0, 7), (500, 12)])
def test_a_write_limit_stores_chunks_while_their_request_lives_and_loses_its_state(
    outputs: int, num_chunks: int
) -> None:
    """63 MB at once and 50 MB a second: 7 chunks until the prompt's state comes, after 0.31 s."""
    disk = IndexShelf(None)
    replay = replay_of(IndexShelf(None), disk, write_bytes_per_s=50_000_000)
    replay.serve(request(*range(1, 13), outputs=outputs))
    replay.serve(request(99, at=60.0))
    assert [disk.has(chunk_id(block)) for block in range(1, 13)] == [block <= num_chunks for block in range(1, 13)]
    assert not disk.has(snapshot_id(12))


def test_without_a_limit_the_same_prompt_keeps_its_state() -> None:
    disk = IndexShelf(None)
    replay_of(IndexShelf(None), disk).serve(request(*range(1, 13)))
    assert disk.has(snapshot_id(12))


def test_lost_stores_depend_on_the_seed_alone() -> None:
    def kept(seed: int) -> list[bool]:
        disk = IndexShelf(None)
        replay = replay_of(IndexShelf(None), disk, lost_share=0.5, seed=seed)
        for block in range(0, 100, 2):
            replay.serve(request(block + 1, block + 2))
        return [disk.has(snapshot_id(block + 2)) for block in range(0, 100, 2)]

    assert kept(1) == kept(1) != kept(2)
    assert 10 < sum(kept(1)) < 40


def test_objects_for_themselves_go_by_their_last_use_and_the_deepest_first() -> None:
    shelf = OpenShelf(3 * CHUNK)
    chunks = [
        Replay(STATES, [], False)._planner.chunk([bytes([n]) for n in range(5)], STATES.full[0], n) for n in range(5)
    ]
    gone: list[ObjectId] = []
    shelf.evicted = lambda held: gone.append(held.object_id)
    for chunk in chunks[:3]:
        shelf.put(chunk)
    shelf.tick()
    shelf.use([chunks[2].object_id])
    shelf.put(chunks[4])
    shelf.put(chunks[3])
    assert gone == [chunks[1].object_id, chunks[0].object_id]


def test_times_are_the_slower_sides_and_the_rest_is_computed() -> None:
    """25 GB/s, 1 GB/s, 20,000 tokens a second: computing 10,000 tokens takes half a second."""
    whole, split = Load(8000, 0, 600_000_000), Load(8000, 500_000_000, 100_000_000)
    near = Load(6000, 250_000_000, 0)
    hit = Served(10_000, whole, alone=(near, whole), composed=(near, split))
    found = composition.times([hit, Served(10_000, Load(), (), ())], disk_gb_per_s=1)
    assert (found.load_by_tokens, found.load_composed) == pytest.approx((600.0, 100.0))
    assert found.first_token_by_tokens == pytest.approx((700.0 + 500.0) / 2)
    assert found.first_token_by_time == pytest.approx((210.0 + 500.0) / 2)
    assert found.first_token_composed == pytest.approx((200.0 + 500.0) / 2)


def line(prompt: TraceRequest) -> str:
    ids = [*prompt.block_ids, 10_000]
    fields = {"timestamp": prompt.arrival_s * 1000, "input_length": prompt.num_tokens}
    return json.dumps({**fields, "output_length": prompt.num_output_tokens, "hash_ids": ids}) + "\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rounds = [request(*range(100 * n, 100 * n + 4), at=float(n)) for n in range(1, 6)]
    path.write_text("".join(map(line, rounds + rounds)))
    return path


def test_a_trace_is_read_without_its_partial_blocks(trace: Path) -> None:
    first = read_trace(trace)[0]
    assert first == TraceRequest(1.0, 4 * 512 + 76, 500, (100, 101, 102, 103))


@pytest.mark.parametrize(
    "text", ["", "{}\n", '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": []}']
)
def test_what_is_no_trace_is_refused_with_its_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"trace\.jsonl"):
        read_trace(path)


def test_the_command_prints_both_tables_and_where_composing_gains(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert composition.main([str(trace), "--cpu", "2", "--setting", "never in both"]) == 0
    out = capsys.readouterr().out
    assert "10 requests, 21240 prompt tokens, W = 0 GB" in out
    assert "| W/2 | both store all " in out and "| W/2 | never in both " in out


def test_the_command_prints_json(trace: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert composition.main([str(trace), "--cpu", "1", "2", "--setting", "CPU restarted once", "--json"]) == 0
    rows = json.loads(capfdbinary.readouterr().out)["rows"]
    assert [(row["setting"], row["cpu_share"]) for row in rows] == [
        ("CPU restarted once", "W/1"),
        ("CPU restarted once", "W/2"),
    ]
    assert rows[0]["single"] == rows[0]["composed"] == pytest.approx(5 * 4 * 512 / 21240)


def test_the_command_says_what_is_wrong(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--setting", "no such"], ["--cpu", "0"]):
        with pytest.raises(SystemExit):
            composition.main([str(trace), *arguments])
    with pytest.raises(SystemExit):
        composition.main(["nowhere.jsonl"])
    assert "no such" in capsys.readouterr().err
