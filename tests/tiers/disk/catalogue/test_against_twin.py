# SPDX-License-Identifier: Apache-2.0
"""Random steps of several writers, each held to a naive twin."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.inside import collectors, find, granted
from tests.tiers.disk.catalogue.objects import (
    MODEL,
    NOW,
    OTHERS,
    PRIVATE,
    SNAPSHOT,
    Engine,
    files,
    object_id,
    stored,
    writer_name,
)
from tests.tiers.disk.catalogue.twin import Name, Twin, TwinObject, name_of
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import (
    Catalogue,
    File,
    Garbage,
    Limits,
    Namespace,
    Scored,
    StoredObject,
    Superseded,
    replace_damaged,
)

UNIT = 1000
CAPACITY = 40 * UNIT
SERVED = st.sampled_from((MODEL, Namespace(MODEL.fingerprint), OTHERS, PRIVATE))
NAMESPACES = st.sampled_from((MODEL, OTHERS, PRIVATE))
IDS = [object_id(number) for number in range(8)] + [object_id(number, SNAPSHOT) for number in range(4)]

some_ids = st.lists(st.sampled_from(IDS), max_size=6)
some_bytes = st.integers(0, 8 * UNIT)


def chain(number: int, namespace: Namespace, num_bytes: int) -> list[StoredObject]:
    """A chunk of a binary tree, after its ancestors."""
    above = chain((number - 1) // 2, namespace, UNIT) if number else []
    return [*above, stored(number, ((number - 1) // 2,) if number else (), namespace, num_bytes)]


@st.composite
def batches(draw: st.DrawFn) -> list[StoredObject]:
    """Chunks with all or none of their ancestors, and snapshots over two chunks."""
    number, num_bytes = draw(st.integers(0, 7)), draw(st.sampled_from((UNIT, 2 * UNIT)))
    namespace = draw(NAMESPACES)
    kind = draw(st.sampled_from(("whole", "alone", "snapshot", "snapshot alone")))
    if not kind.startswith("snapshot"):
        return chain(number, namespace, num_bytes)[0 if kind == "whole" else -1 :]
    parents = number, (number + 1) % 8
    below = [item for parent in parents for item in chain(parent, namespace, UNIT)]
    return [*(below if kind == "snapshot" else []), stored(number % 4, parents, namespace, num_bytes, kind=SNAPSHOT)]


class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.root = tempfile.mkdtemp()
        self.now = NOW
        self.twin = Twin()
        self.num_writers = self.num_files = 0
        self.open: dict[str, Engine] = {}
        self.seen: dict[str, tuple[int, dict[ObjectId, StoredObject]]] = {}
        self.ever: list[StoredObject] = []
        self.reader = Catalogue(self.root)
        self.reader.end_rebuild()
        for served in (
            MODEL,
            MODEL,
            OTHERS,
        ):  # so that there is somebody who can end, and somebody who looks after that
            self.join(served)

    def teardown(self) -> None:
        for each in (*getattr(self, "open", {}).values(), *([self.reader] if hasattr(self, "reader") else [])):
            each.close()
        shutil.rmtree(getattr(self, "root", ""), ignore_errors=True)

    def pick(self, data: Any) -> Engine:
        return self.open[data.draw(st.sampled_from(sorted(self.open)))]

    def some_files(self, data: Any) -> list[File]:
        known = [*(entry.item.file for entry in self.twin.objects.values()), *self.twin.garbage]
        return data.draw(st.lists(st.sampled_from([*known, File(writer_name(0), 1)]), max_size=6))  # type: ignore[no-any-return]

    # Writers.

    @precondition(lambda self: len(self.open) < 4)
    @rule(served=SERVED)
    def join(self, served: Namespace) -> None:
        self.num_writers += 1
        engine = Engine(Path(self.root), served, writer_name(self.num_writers))
        self.twin.serve(engine.name, served)
        self.open[engine.name] = engine
        self.follow(engine)

    def follow(self, engine: Engine) -> None:
        """Take what a process takes that begins to serve."""
        seq, slices = engine.catalogue.load(self.twin.writers[engine.name].served or "")
        self.seen[engine.name] = seq, {item.object_id: item for part in slices for item in part}

    @rule(data=st.data(), served=SERVED)
    def serve(self, data: Any, served: Namespace) -> None:
        engine = self.pick(data)
        assert engine.catalogue.join(engine.name, served) == self.twin.writers[engine.name].granted
        self.twin.serve(engine.name, served)
        self.follow(engine)

    @precondition(lambda self: len(self.open) > 1)
    @rule(data=st.data(), in_flight=st.sampled_from((0, UNIT)))
    def leave(self, data: Any, in_flight: int) -> None:
        engine = self.pick(data)
        engine.catalogue.leave(engine.name, in_flight)
        self.twin.leave(engine.name, in_flight)
        self.ended(engine)
        with pytest.raises(Superseded, match="join anew"):
            self.reader.give_back(writer_name(0), 0)

    @precondition(lambda self: len(self.open) > 1)
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        self.ended(self.pick(data))

    def ended(self, engine: Engine) -> None:
        engine.close()
        del self.open[engine.name], self.seen[engine.name]

    @rule(data=st.data())
    def bury(self, data: Any) -> None:
        heir = self.pick(data)
        assert heir.catalogue.writers() == set(self.twin.writers)
        for dead in sorted({*self.twin.writers, writer_name(1)} - set(self.open)):
            heir.catalogue.bury(dead, heir.name)
            self.twin.bury(dead, heir.name)

    @rule(data=st.data(), words=st.binary(max_size=3))
    def learn(self, data: Any, words: bytes) -> None:
        engine = self.pick(data)
        fingerprint = self.twin.writers[engine.name].served or ""
        engine.catalogue.keep_learned(fingerprint, words)
        self.twin.learned[fingerprint] = words

    # Room.

    @rule(data=st.data(), num_bytes=some_bytes, at_least=st.sampled_from((UNIT, 2 * UNIT, 6 * UNIT)))
    def grant(self, data: Any, num_bytes: int, at_least: int) -> None:
        engine = self.pick(data)
        assert engine.grant(num_bytes, at_least, CAPACITY).num_bytes == self.twin.grant(
            engine.name, num_bytes, at_least, CAPACITY
        )

    @rule(data=st.data(), num_bytes=some_bytes)
    def give_back(self, data: Any, num_bytes: int) -> None:
        engine = self.pick(data)
        left = max(0, self.twin.writers[engine.name].granted - num_bytes)
        self.twin.writers[engine.name].granted = left
        assert engine.catalogue.give_back(engine.name, num_bytes) == left

    # Objects.

    @rule(data=st.data(), parts=st.lists(batches(), min_size=1, max_size=4), replaces=st.booleans())
    def commit(self, data: Any, parts: list[list[StoredObject]], replaces: bool) -> None:
        engine = self.pick(data)
        engine.grant(20 * UNIT, 20 * UNIT, CAPACITY)
        self.twin.grant(engine.name, 20 * UNIT, 20 * UNIT, CAPACITY)
        batch = []
        for item in (item for part in parts for item in part):
            self.num_files += 1
            written = msgspec.structs.replace(item, file=File(engine.name, self.num_files), last_use=self.now)
            before = self.twin.objects.get(name_of(item))
            batch.append((written, before.item.file if replaces and before is not None else None))
            self.ever.append(written)
        self.told(engine, batch)

    @rule(data=st.data())
    def commit_again(self, data: Any) -> None:
        """What a rebuild may have taken, preferred another one to, or seen unlinked."""
        engine = self.pick(data)
        if mine := [item for item in self.ever if item.file.writer == engine.name]:
            self.told(engine, [(data.draw(st.sampled_from(mine)), None)])

    def told(self, engine: Engine, batch: list[tuple[StoredObject, File | None]]) -> None:
        expected = [self.twin.commit(engine.name, *pair) for pair in batch]
        assert engine.catalogue.commit(engine.name, batch) == expected
        assert engine.catalogue.give_back(engine.name, 0) == self.twin.writers[engine.name].granted

    @rule(data=st.data(), namespace=NAMESPACES, wanted=some_ids)
    def touch(self, data: Any, namespace: Namespace, wanted: list[ObjectId]) -> None:
        self.now += 1
        self.pick(data).catalogue.touch(namespace.fingerprint, wanted, self.now)
        if wanted and namespace.fingerprint in self.twin.namespaces:
            self.twin.used(self.now)
        for entry in self.entries(namespace, wanted):
            entry.item = msgspec.structs.replace(entry.item, last_use=self.now)
            if entry.score:
                entry.score = self.now, entry.score[1]

    def entries(self, namespace: Namespace, wanted: list[ObjectId]) -> list[TwinObject]:
        names = {(namespace.fingerprint, each) for each in wanted}
        return [self.twin.objects[each] for each in names & set(self.twin.objects)]

    @rule(
        data=st.data(),
        namespace=NAMESPACES,
        wanted=some_ids,
        score=st.integers(NOW - 5, NOW + 50),
        ago=st.integers(0, 9),
        seconds=st.integers(0, 5),
    )
    def score(
        self, data: Any, namespace: Namespace, wanted: list[ObjectId], score: int, ago: int, seconds: int
    ) -> None:
        until = self.now - ago
        scored = [Scored(each, score + 0.5, until) for each in wanted]
        self.pick(data).catalogue.publish_scores(namespace.fingerprint, scored, self.now + seconds)
        for entry in self.entries(namespace, wanted):
            if entry.item.last_use <= until:
                entry.score = score + 0.5, self.now + seconds

    # Removal.

    @rule(data=st.data(), num_bytes=some_bytes, num_objects=st.integers(0, 9))
    def evict(self, data: Any, num_bytes: int, num_objects: int) -> None:
        engine, pinned = self.pick(data), frozenset(self.some_files(data))
        self.now += 1
        self.twin.forget_scores(self.now)
        expected = self.twin.victims(num_bytes, num_objects, set(pinned))
        limits = Limits(num_bytes, num_objects, pinned)
        assert files(engine.catalogue.choose_victims(limits, self.now)) == expected
        assert files(engine.evict(limits, self.now)) == expected
        for file in expected:
            self.twin.take_out(engine.name, file)

    @rule(data=st.data())
    def claim(self, data: Any) -> None:
        engine = self.pick(data)
        found: list[Garbage] = []
        while part := engine.catalogue.garbage(engine.name, 2, found[-1].file if found else None):
            found += part
        mine = {file: item for file, (item, of) in self.twin.garbage.items() if of in (None, engine.name)}
        assert sorted(files(found)) == sorted(mine)
        for file, item in mine.items():
            self.twin.garbage[file] = item, engine.name

    @rule(data=st.data(), keep=some_bytes)
    def collected(self, data: Any, keep: int) -> None:
        engine, gone = self.pick(data), self.some_files(data)
        kept = engine.catalogue.collected(engine.name, gone, keep, CAPACITY)
        assert kept == self.twin.collected(engine.name, gone, keep, CAPACITY)

    # A lost catalogue. Everybody joins anew, and one reads the files.

    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        before, generation = self.twin, self.reader.generation
        replace_damaged(self.root, generation)
        with pytest.raises(Superseded):
            self.reader.totals()
        self.reader.close()
        self.reader = Catalogue(self.root)
        self.twin = Twin(is_complete=False)
        for name, engine in self.open.items():
            engine.close()
            served = before.namespaces[before.writers[name].served or ""]
            self.open[name] = Engine(Path(self.root), served, name, is_complete=False)
            self.twin.serve(name, served)
        self.rebuild(self.pick(data), before)
        for engine in self.open.values():
            self.follow(engine)

    def rebuild(self, engine: Engine, before: Twin) -> None:
        winners = [entry.item for entry in sorted(before.objects.values(), key=lambda entry: entry.age)]
        losers = [item for item, _ in before.garbage.values()]
        private = [each for each in before.namespaces.values() if each.is_private]
        assert engine.grant(UNIT, UNIT, CAPACITY).num_bytes == 0
        for _ in range(2):  # the first one is killed before its end
            engine.catalogue.adopt(winners, private)
            engine.catalogue.adopt(losers[::2])
            engine.catalogue.discard(Garbage(item.file, 1, item.num_bytes) for item in [*losers[1::2], *winners])
        for each in private:
            self.twin.add_namespace(each)
        for item in (*winners, *losers[::2]):
            self.twin.adopt(item)
        for item in losers[1::2]:
            self.twin.garbage.setdefault(item.file, (item, None))
        assert engine.catalogue.numbers_of(engine.name) is None
        engine.catalogue.end_rebuild()
        self.twin.is_complete = True

    # What everybody sees.

    @rule(data=st.data())
    def catch_up(self, data: Any) -> None:
        """A load, and the changes after it, lead to what is there. An entry goes only with its file."""
        engine = self.pick(data)
        served = self.twin.writers[engine.name].served or ""
        seq, known = self.seen[engine.name]
        has_more = True
        while has_more:
            found = engine.catalogue.changes_since(seq, served)
            for change in found.changes:
                if isinstance(change, StoredObject):
                    known[change.object_id] = change
                elif change.object_id in known and known[change.object_id].file == change.file:
                    del known[change.object_id]
            seq, has_more = found.seq, found.has_more
        there = self.of_namespace(Namespace(served))
        expected = {each: (item.file, item.planned) for each, item in there.items()}
        assert {each: (item.file, item.planned) for each, item in known.items()} == expected
        self.seen[engine.name] = seq, known

    def of_namespace(self, namespace: Namespace) -> dict[ObjectId, StoredObject]:
        return {
            each: entry.item
            for (fingerprint, each), entry in self.twin.objects.items()
            if fingerprint == namespace.fingerprint
        }

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "reader"):
            return
        assert check(self.reader) == []
        totals = self.reader.totals()
        assert (totals.object_bytes, totals.num_objects) == (self.twin.object_bytes, len(self.twin.objects))
        assert totals.num_bytes == self.twin.num_bytes and totals.newest_use == self.twin.newest_use
        for namespace in (MODEL, OTHERS, PRIVATE):
            found = find(self.reader, namespace.fingerprint, IDS)
            assert {item.object_id: item for item in found} == self.of_namespace(namespace)
        expected = {name: (row.served, row.granted) for name, row in self.twin.writers.items()}
        assert granted(self.reader) == expected
        assert collectors(self.reader) == {file: of for file, (_, of) in self.twin.garbage.items()}
        self.twin.forget_scores(self.now)
        there = [entry.item.file for entry in self.twin.objects.values()]
        for pinned in (set(), {file for file in there if file.number % 3 == 0}):
            limits = Limits(1 << 40, len(there), frozenset(pinned))
            assert files(self.reader.choose_victims(limits, self.now)) == self.twin.victims(1 << 40, len(there), pinned)

    @rule(data=st.data())
    def names(self, data: Any) -> None:
        known = {*(entry.item.file for entry in self.twin.objects.values()), *self.twin.garbage}
        asked = self.some_files(data)
        assert self.reader.named(asked) == set(asked) & known
        for number in range(self.num_writers + 1):
            name = writer_name(number)
            assert self.reader.numbers_of(name) == {file.number for file in known if file.writer == name}

    @rule()
    def load(self) -> None:
        everything: dict[Name, StoredObject] = {}
        for namespace in (MODEL, OTHERS, PRIVATE):
            found = [item for part in self.reader.load(namespace.fingerprint)[1] for item in part]
            places = {item.object_id: place for place, item in enumerate(found)}
            assert {item.object_id: item for item in found} == self.of_namespace(namespace)
            assert len(places) == len(found)
            for item in found:
                assert all(places[parent] < places[item.object_id] for parent in item.planned.parents)
            everything |= {name_of(item): item for item in found}
        assert {name_of(item): item for part in self.reader.load_all() for item in part} == everything

    @rule()
    def usage(self) -> None:
        found = {each.fingerprint: each for each in self.reader.usage()}
        assert set(found) == set(self.twin.namespaces)
        for fingerprint, namespace in self.twin.namespaces.items():
            mine, each = self.of_namespace(namespace), found[fingerprint]
            assert (each.num_objects, each.num_bytes) == (len(mine), sum(item.num_bytes for item in mine.values()))
            assert Namespace(fingerprint, each.words, each.is_private) == namespace
            assert each.is_served == any(row.served == fingerprint for row in self.twin.writers.values())
            assert self.reader.learned(fingerprint) == self.twin.learned.get(fingerprint)


TestAgainstTwin = Machine.TestCase
TestAgainstTwin.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
