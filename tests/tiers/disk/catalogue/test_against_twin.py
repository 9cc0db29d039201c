# SPDX-License-Identifier: Apache-2.0
"""Random steps of several members, each held to a naive twin."""

import shutil
import tempfile
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import CHUNKS, NOW, OTHERS, SNAPSHOTS, name, stored
from tests.tiers.disk.catalogue.twin import Twin
from vllm_overlay.tiers.disk.catalogue import Catalogue, Limits, Name, Namespace, Scored, StoredObject

TEMPORARY = Namespace("d" * 64, "d" * 64, is_temporary=True)
SERVED = ([CHUNKS, SNAPSHOTS], [CHUNKS], [OTHERS], [TEMPORARY], [])
UNIT = 1000
CAPACITY = 40 * UNIT
ALL_NAMES = [name(number, namespace) for namespace in (CHUNKS, OTHERS, TEMPORARY) for number in range(8)]
ALL_NAMES += [name(number, SNAPSHOTS, "s") for number in range(4)]

some_names = st.lists(st.sampled_from(ALL_NAMES), max_size=6)
some_bytes = st.integers(0, 8 * UNIT)


def chain(number: int, namespace: Namespace, num_bytes: int) -> list[StoredObject]:
    """A chunk of a binary tree, after its ancestors."""
    above = chain((number - 1) // 2, namespace, UNIT) if number else []
    return [*above, stored(number, ((number - 1) // 2,) if number else (), namespace, num_bytes)]


@st.composite
def batches(draw: st.DrawFn) -> list[StoredObject]:
    """Chunks with all or none of their ancestors, snapshots over two chunks, or one that depends on other objects."""
    number, num_bytes = draw(st.integers(0, 7)), draw(st.sampled_from((UNIT, 2 * UNIT)))
    namespace = draw(st.sampled_from((CHUNKS, OTHERS, TEMPORARY)))
    kind = draw(st.sampled_from(("whole", "alone", "snapshot", "snapshot alone", "other parents")))
    if kind == "other parents":
        return [stored(number, (), namespace, num_bytes)]
    if not kind.startswith("snapshot"):
        return chain(number, namespace, num_bytes)[0 if kind == "whole" else -1 :]
    parents = number, (number + 1) % 8
    below = [item for parent in parents for item in chain(parent, CHUNKS, UNIT)]
    return [*(below if kind == "snapshot" else []), stored(number % 4, parents, SNAPSHOTS, num_bytes, tag="s")]


class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.root = tempfile.mkdtemp()
        self.now = NOW
        self.twin = Twin()
        self.open: dict[int, Catalogue] = {}
        self.seen: dict[int, tuple[int, dict[Name, StoredObject]]] = {}
        self.unlinking: list[tuple[int, list[Name]]] = []
        self.reader = Catalogue(self.root)
        self.join([CHUNKS, SNAPSHOTS])
        first = next(iter(self.open.values()))
        assert first.begin_rebuild()
        first.end_rebuild()

    def teardown(self) -> None:
        for catalogue in [*getattr(self, "open", {}).values(), *([self.reader] if hasattr(self, "reader") else [])]:
            catalogue.close()
        shutil.rmtree(getattr(self, "root", ""), ignore_errors=True)

    def pick(self, data: Any) -> tuple[int, Catalogue]:
        slot = data.draw(st.sampled_from(sorted(self.open)))
        return slot, self.open[slot]

    # Members.

    @precondition(lambda self: len(self.open) < 4)
    @rule(served=st.sampled_from(SERVED))
    def join(self, served: list[Namespace]) -> None:
        catalogue = Catalogue(self.root)
        slot = catalogue.join(served, self.now)
        assert slot not in self.twin.members
        self.twin.serve(slot, served)
        self.open[slot] = catalogue
        self.follow(catalogue, slot)

    def follow(self, catalogue: Catalogue, slot: int) -> None:
        """Take what a starting process takes."""
        seq, slices = catalogue.load([CHUNKS.fingerprint, SNAPSHOTS.fingerprint])
        self.seen[slot] = seq, {item.name: item for part in slices for item in part}

    @precondition(lambda self: len(self.open) > 1)
    @rule(data=st.data(), in_flight=st.sampled_from((0, 0, UNIT)))
    def leave(self, data: Any, in_flight: int) -> None:
        slot, catalogue = self.pick(data)
        catalogue.leave(in_flight)
        catalogue.close()
        del self.open[slot], self.seen[slot]
        left = self.twin.members[slot]
        left.is_alive = False
        left.granted = min(left.granted, in_flight)
        if not in_flight and not any(owner == slot for owner, _ in self.twin.removals.values()):
            del self.twin.members[slot]

    @precondition(lambda self: len(self.open) > 1)
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        slot, catalogue = self.pick(data)
        catalogue.close()
        del self.open[slot], self.seen[slot]
        self.twin.members[slot].is_alive = False

    @rule(data=st.data())
    def bury(self, data: Any) -> None:
        _, catalogue = self.pick(data)
        expected = {slot: dead.granted for slot, dead in self.twin.members.items() if not dead.is_alive}
        found = catalogue.dead_members()
        assert {dead.slot: dead.granted_bytes for dead in found} == expected
        for dead in found:
            unlinking = {name for name, entry in self.twin.removals.items() if entry[0] == dead.slot}
            assert {item.name for item in dead.removals} == unlinking
            assert catalogue.bury(dead.slot) == self.twin.bury(dead.slot)
        assert all(catalogue.bury(slot) == 0 for slot in self.open)

    @rule(data=st.data(), served=st.sampled_from(SERVED))
    def serve(self, data: Any, served: list[Namespace]) -> None:
        slot, catalogue = self.pick(data)
        catalogue.serve(served, self.now)
        self.twin.serve(slot, served)

    @rule(data=st.data())
    def drop_empty_namespaces(self, data: Any) -> None:
        _, catalogue = self.pick(data)
        used = {name.fingerprint for name in (*self.twin.objects, *self.twin.removals)}
        for each in self.twin.members.values():
            used |= {fingerprint for n in each.served for fingerprint in (n.fingerprint, n.partner)}
        used |= {self.twin.namespaces[fingerprint].partner for fingerprint in used}
        assert set(catalogue.drop_empty_namespaces()) == set(self.twin.namespaces) - used
        self.twin.namespaces = {key: value for key, value in self.twin.namespaces.items() if key in used}

    # Room.

    @rule(data=st.data(), num_bytes=some_bytes, at_least=st.sampled_from((UNIT, 2 * UNIT, 6 * UNIT)))
    def grant(self, data: Any, num_bytes: int, at_least: int) -> None:
        slot, catalogue = self.pick(data)
        assert catalogue.grant(num_bytes, at_least, CAPACITY).num_bytes == self.twin.grant(
            slot, num_bytes, at_least, CAPACITY
        )

    @rule(data=st.data(), num_bytes=some_bytes)
    def give_back(self, data: Any, num_bytes: int) -> None:
        slot, catalogue = self.pick(data)
        left = max(0, self.twin.members[slot].granted - num_bytes)
        self.twin.members[slot].granted = left
        assert catalogue.give_back(num_bytes) == left

    # Objects.

    @rule(data=st.data(), parts=st.lists(batches(), min_size=1, max_size=4))
    def commit(self, data: Any, parts: list[list[StoredObject]]) -> None:
        batch = [item for part in parts for item in part]
        slot, catalogue = self.pick(data)
        catalogue.grant(20 * UNIT, 20 * UNIT, CAPACITY)
        self.twin.grant(slot, 20 * UNIT, 20 * UNIT, CAPACITY)
        expected = [(item, why) for item in batch if (why := self.twin.commit(slot, item)) is not None]
        result = catalogue.commit(batch)
        assert result.refused == expected
        assert result.granted_bytes == self.twin.members[slot].granted

    @rule(data=st.data(), wanted=some_names)
    def touch(self, data: Any, wanted: list[Name]) -> None:
        _, catalogue = self.pick(data)
        self.now += 1
        catalogue.touch(wanted, self.now)
        for each in set(wanted) & set(self.twin.objects):
            entry = self.twin.objects[each]
            entry.item = StoredObject(
                each.fingerprint, entry.item.planned, 1, entry.item.num_bytes, entry.item.ticket, self.now
            )
            if entry.score:
                entry.score = self.now, entry.score[1]

    @rule(
        data=st.data(),
        wanted=some_names,
        score=st.integers(NOW - 5, NOW + 50),
        ago=st.integers(0, 9),
        seconds=st.integers(0, 5),
    )
    def score(self, data: Any, wanted: list[Name], score: int, ago: int, seconds: int) -> None:
        _, catalogue = self.pick(data)
        until = self.now - ago
        catalogue.publish_scores([Scored(each, score + 0.5, until) for each in wanted], self.now + seconds)
        for each in set(wanted) & set(self.twin.objects):
            if self.twin.objects[each].item.last_use <= until:
                self.twin.objects[each].score = score + 0.5, self.now + seconds

    # Removal.

    @rule(
        data=st.data(),
        num_bytes=some_bytes,
        num_objects=st.integers(0, 9),
        pinned=some_names,
    )
    def evict(self, data: Any, num_bytes: int, num_objects: int, pinned: list[Name]) -> None:
        slot, catalogue = self.pick(data)
        self.now += 1
        self.twin.forget_scores(self.now)
        expected = self.twin.victims(num_bytes, num_objects, set(pinned))
        limits = Limits(num_bytes, num_objects, frozenset(pinned))
        assert [item.name for item in catalogue.choose_victims(limits, self.now)] == expected
        assert [item.name for item in catalogue.evict(limits, self.now)] == expected
        self.took_out(slot, expected)

    @rule(data=st.data(), wanted=some_names)
    def remove(self, data: Any, wanted: list[Name]) -> None:
        slot, catalogue = self.pick(data)
        expected = set[Name]().union(*map(self.twin.subtree, wanted))
        removed = [item.name for part in catalogue.remove(wanted) for item in part]
        places = {each: place for place, each in enumerate(removed)}
        assert all(places[child] < places[each] for each in removed for child in self.twin.children(each))
        assert set(removed) == expected and len(places) == len(removed)
        self.took_out(slot, removed)

    def took_out(self, slot: int, gone: list[Name]) -> None:
        for each in gone:
            self.twin.take_out(slot, each)
        self.unlinking.append((slot, gone))

    @precondition(lambda self: self.unlinking)
    @rule(data=st.data(), keep=some_bytes)
    def end_removal(self, data: Any, keep: int) -> None:
        slot, gone = self.unlinking.pop(data.draw(st.integers(0, len(self.unlinking) - 1)))
        if slot in self.open:
            kept = self.open[slot].end_removal(gone, keep, CAPACITY)
            assert kept == self.twin.end_removal(slot, gone, keep, CAPACITY)

    # What everybody sees.

    @rule(data=st.data())
    def catch_up(self, data: Any) -> None:
        """A load, and the changes after it, lead to what is there."""
        slot, catalogue = self.pick(data)
        seq, known = self.seen[slot]
        has_more = True
        while has_more:
            found = catalogue.changes_since(seq, [CHUNKS.fingerprint, SNAPSHOTS.fingerprint])
            for change in found.changes:
                if isinstance(change, StoredObject):
                    known[change.name] = change
                else:
                    known.pop(change, None)
            seq, has_more = found.seq, found.has_more
        mine = {CHUNKS.fingerprint, SNAPSHOTS.fingerprint}
        expected = {each: entry.item for each, entry in self.twin.objects.items() if each.fingerprint in mine}
        assert {each: item.ticket for each, item in known.items()} == {
            each: item.ticket for each, item in expected.items()
        }
        self.seen[slot] = seq, known

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "reader"):
            return
        assert check(self.reader) == []
        totals = self.reader.totals()
        assert (totals.object_bytes, totals.num_objects) == (self.twin.object_bytes, len(self.twin.objects))
        assert totals.num_bytes == self.twin.num_bytes <= CAPACITY
        assert self.reader.find(ALL_NAMES) == [
            self.twin.objects[each].item for each in ALL_NAMES if each in self.twin.objects
        ]

    @rule()
    def load(self) -> None:
        chunks, snapshots = CHUNKS.fingerprint, SNAPSHOTS.fingerprint
        for mine in ([chunks], [chunks, snapshots], [OTHERS.fingerprint, TEMPORARY.fingerprint]):
            found = [item for part in self.reader.load(mine)[1] for item in part]
            expected = {each for each in self.twin.objects if each.fingerprint in mine}
            places = {item.name: place for place, item in enumerate(found)}
            assert set(places) == expected and len(found) == len(expected)
            assert {item.name: item for item in found} == {each: self.twin.objects[each].item for each in expected}
            for item in found:
                assert all(places[parent] < places[item.name] for parent in self.twin.objects[item.name].parents)

    @rule()
    def usage(self) -> None:
        found = {each.fingerprint: (each.num_objects, each.num_bytes) for each in self.reader.usage()}
        for fingerprint in self.twin.namespaces:
            of_one = [entry.item for each, entry in self.twin.objects.items() if each.fingerprint == fingerprint]
            assert found.pop(fingerprint) == (len(of_one), sum(item.num_bytes for item in of_one))
        assert not found


TestAgainstTwin = Machine.TestCase
TestAgainstTwin.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
