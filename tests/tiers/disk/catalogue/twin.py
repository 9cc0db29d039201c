# SPDX-License-Identifier: Apache-2.0
"""The naive twin of the catalogue: dicts, everything recomputed from scratch."""

from dataclasses import dataclass, field, replace

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import Name, Namespace, Refusal, StoredObject


@dataclass
class TwinObject:
    item: StoredObject
    age: int
    parents: list[Name]
    score: tuple[float, int] | None = None

    @property
    def place(self) -> float:
        return self.score[0] if self.score else self.item.last_use


def pass_on(gone: TwinObject, left: dict[Name, TwinObject]) -> None:
    """Its score, to parents that have no other child and no score."""
    for name in gone.parents:
        if name in left and not left[name].score and not any(name in entry.parents for entry in left.values()):
            left[name].score = gone.score


@dataclass
class TwinMember:
    served: list[Namespace]
    granted: int = 0
    is_alive: bool = True


@dataclass
class Twin:
    """``removals`` has who unlinks a name, and its bytes."""

    namespaces: dict[str, Namespace] = field(default_factory=dict)
    objects: dict[Name, TwinObject] = field(default_factory=dict)
    members: dict[int, TwinMember] = field(default_factory=dict)
    removals: dict[Name, tuple[int, int]] = field(default_factory=dict)
    age: int = 0

    # Members.

    def serve(self, slot: int, served: list[Namespace]) -> None:
        self.members.setdefault(slot, TwinMember([])).served = served
        for namespace in served:
            partner = Namespace(namespace.partner, namespace.partner, namespace.is_temporary)
            self.namespaces.setdefault(namespace.partner, partner)
            self.namespaces.setdefault(namespace.fingerprint, namespace)

    def bury(self, slot: int) -> int:
        dead = self.members.pop(slot)
        freed = dead.granted + sum(num_bytes for owner, num_bytes in self.removals.values() if owner == slot)
        self.removals = {name: entry for name, entry in self.removals.items() if entry[0] != slot}
        return freed

    # Room.

    @property
    def object_bytes(self) -> int:
        return sum(entry.item.num_bytes for entry in self.objects.values())

    @property
    def num_bytes(self) -> int:
        granted = sum(member.granted for member in self.members.values())
        return self.object_bytes + granted + sum(num_bytes for _, num_bytes in self.removals.values())

    def grant(self, slot: int, num_bytes: int, at_least: int, capacity: int) -> int:
        part = max(at_least, capacity // 32 // len(self.members))
        wanted = min(num_bytes, max(0, part - self.members[slot].granted))
        granted = max(0, min(wanted, capacity - self.num_bytes))
        self.members[slot].granted += granted
        return granted

    # Objects.

    def children(self, name: Name) -> list[Name]:
        return [other for other, entry in self.objects.items() if name in entry.parents]

    def commit(self, slot: int, item: StoredObject) -> Refusal | None:
        if (namespace := self.namespaces.get(item.fingerprint)) is None:
            return Refusal.NAMESPACE
        parents = [Name(namespace.partner, parent) for parent in item.planned.parents]
        if any(parent not in self.objects for parent in parents):
            return Refusal.PARENT
        if self.members[slot].granted < item.num_bytes:
            return Refusal.NO_GRANT
        if item.name in self.removals:
            return Refusal.REMOVING
        before = self.objects.get(item.name)
        if before is not None and before.parents != parents:
            return Refusal.OTHER_PARENTS
        self.members[slot].granted -= item.num_bytes
        if before is not None:
            before.item = item
        else:
            self.age += 1
            self.objects[item.name] = TwinObject(item, self.age, parents)
        return None

    def take_out(self, slot: int, name: Name) -> None:
        gone = self.objects.pop(name)
        self.removals[name] = slot, gone.item.num_bytes
        pass_on(gone, self.objects)

    def end_removal(self, slot: int, names: list[Name], keep: int, capacity: int) -> int:
        freed = 0
        for name in names:
            if name in self.removals and self.removals[name][0] == slot:
                freed += self.removals.pop(name)[1]
        kept = max(0, min(freed, keep, capacity - self.num_bytes))
        self.members[slot].granted += kept
        return kept

    def subtree(self, name: Name) -> set[Name]:
        found = {name} & set(self.objects)
        while more := {child for each in found for child in self.children(each)} - found:
            found |= more
        return found

    # Eviction.

    def forget_scores(self, now: int) -> None:
        for entry in self.objects.values():
            if entry.score and entry.score[1] <= now:
                entry.score = None

    def victims(self, num_bytes: int, num_objects: int, pinned: set[Name]) -> list[Name]:
        left = {name: replace(entry) for name, entry in self.objects.items()}
        chosen: list[Name] = []
        while num_bytes > 0 and len(chosen) < num_objects:
            leaves = [
                name
                for name in left
                if name not in pinned and not any(name in entry.parents for entry in left.values())
            ]
            if not leaves:
                break
            first = min(leaves, key=lambda name: (self.rank(name), left[name].place, left[name].age))
            gone = left.pop(first)
            pass_on(gone, left)
            num_bytes -= gone.item.num_bytes
            chosen.append(first)
        return chosen

    def rank(self, name: Name) -> int:
        for member in self.members.values():
            if member.is_alive and any(name.fingerprint in (n.fingerprint, n.partner) for n in member.served):
                return 2
        return 0 if self.namespaces[name.fingerprint].is_temporary else 1

    def parent_ids(self, name: Name) -> tuple[ObjectId, ...]:
        return tuple(parent.object_id for parent in self.objects[name].parents)
