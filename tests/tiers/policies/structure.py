# SPDX-License-Identifier: Apache-2.0
"""Whether the runs and points that a learned policy keeps are those that one would find by looking at the index."""

from tests.tiers.entries import entries_of
from vllm_overlay.planner.objects import ObjectKind
from vllm_overlay.tiers.entry import Entry, EntryState
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies.learned import LearnedEviction
from vllm_overlay.tiers.policies.runs import Point, Run, chunk_above, chunks_of


def visible_entries(index: PrefixIndex) -> list[Entry]:
    return [entry for entry in entries_of(index).values() if entry.state is EntryState.COMMITTED]


def runs_of(index: PrefixIndex) -> list[Run]:
    units = {id(entry.unit): entry.unit for entry in visible_entries(index) if isinstance(entry.unit, Run)}
    return list(units.values())


def check_runs(index: PrefixIndex, policy: LearnedEviction) -> None:
    """Every visible chunk is in one run, every snapshot is one point; runs and points know each other."""
    entries = visible_entries(index)
    for entry in entries_of(index).values():
        if entry.state is not EntryState.COMMITTED:
            assert entry.unit is None
    for entry in entries:
        if entry.object_id.kind is ObjectKind.FULL_ATTENTION:
            check_chunk(entry)
        elif entry.object_id.is_snapshot:
            assert isinstance(entry.unit, Point)
            assert entry.unit.entry is entry
            assert {run.tail for run in entry.unit.runs} == set(entry.parents)
    found = runs_of(index)
    for run in found:
        check_run(run, found)
    check_candidates(policy, found, entries)


def check_chunk(chunk: Entry) -> None:
    run, above = chunk.unit, chunk_above(chunk)
    assert isinstance(run, Run)
    below = [
        child
        for child in chunk.children
        if child.object_id.kind is ObjectKind.FULL_ATTENTION and child.state is EntryState.COMMITTED
    ]
    if run.tail is not chunk:
        assert [child.unit for child in below] == [run]
        assert not any(child.object_id.is_snapshot for child in chunk.children if child.unit is not None)
    assert (run.start_tokens == (above.end_tokens if above else 0)) or above.unit is run


def check_run(run: Run, found: list[Run]) -> None:
    assert run.num_bytes == sum(chunk.num_bytes for chunk in chunks_of(run))
    assert set(run.children) == {other for other in found if other.parent is run}
    assert run.parent is None or run.parent in found
    assert run.is_dead == (run.is_leaf and not run.points)
    assert run.points or len(run.children) != 1, "it belongs to the run on top of it"
    assert run.is_closed or all(point.entry is None for point in run.points)
    assert not run.is_closed or any(point.entry is not None or point.hits for point in run.points)
    for point in run.points:
        assert run in point.runs


def check_candidates(policy: LearnedEviction, found: list[Run], entries: list[Entry]) -> None:
    """All that may go is found by way of a candidate, a dead run or a window."""
    assert set(policy._dead) == {run for run in found if run.is_dead}
    points = {point for run in found for point in run.points}
    points |= {entry.unit for entry in entries if isinstance(entry.unit, Point)}
    candidates = policy._candidates._points
    assert [point.place for point in candidates] == list(range(len(candidates)))
    assert set(candidates) <= points
    for entry in entries:
        if entry not in policy._offered or entry.object_id.kind is ObjectKind.SLIDING_WINDOW:
            continue
        unit = entry.unit
        if isinstance(unit, Point):
            assert unit.place >= 0
        elif not unit.is_dead:
            assert unit.tail is entry
            assert any(point.place >= 0 for point in unit.points)
