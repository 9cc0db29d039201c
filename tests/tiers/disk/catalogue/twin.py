# SPDX-License-Identifier: Apache-2.0
"""The naive twin of the catalogue: dicts, everything recomputed from scratch."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import Committed, File, Namespace, StoredObject

Name = tuple[str, ObjectId]


def name_of(item: StoredObject) -> Name:
    return item.fingerprint, item.object_id


@dataclass
class TwinObject:
    item: StoredObject
    age: int
    score: tuple[float, int] | None = None

    @property
    def place(self) -> float:
        return self.score[0] if self.score else self.item.last_use

    @property
    def parents(self) -> list[Name]:
        return [(self.item.fingerprint, parent) for parent in self.item.planned.parents]


def pass_on(gone: TwinObject, left: dict[Name, TwinObject]) -> None:
    """Its score, to parents that have no other child and no score."""
    for name in gone.parents:
        if name in left and not left[name].score and not any(name in entry.parents for entry in left.values()):
            left[name].score = gone.score


@dataclass
class TwinWriter:
    served: str | None
    granted: int = 0


@dataclass
class Twin:
    """``garbage`` has the item of each file, and who unlinks it."""

    namespaces: dict[str, Namespace] = field(default_factory=dict)
    learned: dict[str, bytes] = field(default_factory=dict)
    objects: dict[Name, TwinObject] = field(default_factory=dict)
    writers: dict[str, TwinWriter] = field(default_factory=dict)
    garbage: dict[File, tuple[StoredObject, str | None]] = field(default_factory=dict)
    age: int = 0
    newest_use: int = 0
    is_complete: bool = True

    # Writers.

    def add_namespace(self, new: Namespace) -> None:
        old = self.namespaces.get(new.fingerprint, new)
        self.namespaces[new.fingerprint] = Namespace(
            new.fingerprint, new.words or old.words, new.is_private or old.is_private
        )

    def serve(self, writer: str, namespace: Namespace) -> None:
        self.add_namespace(namespace)
        self.writers.setdefault(writer, TwinWriter(None)).served = namespace.fingerprint
        self.drop_namespaces()

    def leave(self, writer: str, in_flight_bytes: int) -> None:
        self.hand_over(writer, None)
        left = self.writers[writer]
        left.served, left.granted = None, min(left.granted, in_flight_bytes)
        if not left.granted:
            del self.writers[writer]
        self.drop_namespaces()

    def bury(self, writer: str, heir: str) -> None:
        self.hand_over(writer, heir)
        self.writers.pop(writer, None)
        self.drop_namespaces()

    def hand_over(self, writer: str, heir: str | None) -> None:
        for file, (item, collector) in self.garbage.items():
            if collector == writer:
                self.garbage[file] = item, heir

    def drop_namespaces(self) -> None:
        used = {fingerprint for fingerprint, _ in self.objects} | {each.served for each in self.writers.values()}
        if self.is_complete:
            self.namespaces = {key: value for key, value in self.namespaces.items() if key in used}
            self.learned = {key: value for key, value in self.learned.items() if key in used}

    # Room.

    @property
    def object_bytes(self) -> int:
        return sum(entry.item.num_bytes for entry in self.objects.values())

    @property
    def num_bytes(self) -> int:
        granted = sum(writer.granted for writer in self.writers.values())
        return self.object_bytes + granted + sum(item.num_bytes for item, _ in self.garbage.values())

    def grant(self, writer: str, num_bytes: int, at_least: int, capacity: int) -> int:
        serving = sum(each.served is not None for each in self.writers.values())
        wanted = min(num_bytes, max(0, max(at_least, capacity // 32 // serving) - self.writers[writer].granted))
        granted = max(0, min(wanted, capacity - self.num_bytes))
        self.writers[writer].granted += granted
        return granted

    # Objects.

    def used(self, now: int) -> None:
        self.newest_use = max(now, self.newest_use)

    def children(self, name: Name) -> list[Name]:
        return [other for other, entry in self.objects.items() if name in entry.parents]

    def commit(self, writer: str, item: StoredObject, replaced: File | None) -> Committed | None:
        if item.fingerprint not in self.namespaces:
            return None
        before = self.objects.get(name_of(item))
        if before is not None and (before.item.file == item.file or before.item.file != replaced):
            return Committed(before.item.file, is_paid=False)
        if before is None and any(parent not in self.objects for parent in TwinObject(item, 0).parents):
            return None
        if self.writers[writer].granted < item.num_bytes or item.file in self.garbage:
            return None
        self.writers[writer].granted -= item.num_bytes
        if before is not None:
            self.garbage[before.item.file] = before.item, writer
            parents = before.item.planned.parents
            before.item = msgspec.structs.replace(item, planned=msgspec.structs.replace(item.planned, parents=parents))
            self.used(item.last_use)
        else:
            self.insert(item)
        return Committed(item.file, is_paid=True)

    def insert(self, item: StoredObject) -> None:
        self.age += 1
        self.objects[name_of(item)] = TwinObject(item, self.age)
        self.used(item.last_use)

    def adopt(self, item: StoredObject) -> None:
        self.add_namespace(Namespace(item.fingerprint))
        before = self.objects.get(name_of(item))
        if before is not None and before.item.file == item.file:
            return
        if item.file in self.garbage or before is not None:
            self.garbage.setdefault(item.file, (item, None))
        elif all(parent in self.objects for parent in TwinObject(item, 0).parents):
            self.insert(item)
        else:
            self.garbage[item.file] = item, None

    # Eviction.

    def take_out(self, writer: str, file: File) -> None:
        name = next(name for name, entry in self.objects.items() if entry.item.file == file)
        gone = self.objects.pop(name)
        self.garbage[file] = gone.item, writer
        pass_on(gone, self.objects)

    def collected(self, writer: str, files: Iterable[File], keep: int, capacity: int) -> int:
        freed = sum(self.garbage.pop(file)[0].num_bytes for file in set(files) & set(self.garbage))
        kept = max(0, min(freed, keep, capacity - self.num_bytes))
        self.writers[writer].granted += kept
        return kept

    def forget_scores(self, now: int) -> None:
        for entry in self.objects.values():
            if entry.score and entry.score[1] <= now:
                entry.score = None

    def victims(self, num_bytes: int, num_objects: int, pinned: set[File]) -> list[File]:
        left = {name: replace(entry) for name, entry in self.objects.items()}
        chosen: list[File] = []
        while num_bytes > 0 and len(chosen) < num_objects:
            leaves = [
                name
                for name in left
                if left[name].item.file not in pinned and not any(name in entry.parents for entry in left.values())
            ]
            if not leaves:
                break
            first = min(leaves, key=lambda name: (self.rank(name), left[name].place, left[name].age))
            gone = left.pop(first)
            pass_on(gone, left)
            num_bytes -= gone.item.num_bytes
            chosen.append(gone.item.file)
        return chosen

    def rank(self, name: Name) -> int:
        if any(each.served == name[0] for each in self.writers.values()):
            return 2
        return 0 if self.namespaces[name[0]].is_private else 1
