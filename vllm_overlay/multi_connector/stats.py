# SPDX-License-Identifier: Apache-2.0
"""Numbers for each child under its configured name, from any process to the front end.

Two children of one class stay apart, and a child loaded by module path works. Nothing here raises into the engine or
into the loop that serves metrics. What cannot be added up or exported is dropped and logged once.
"""

import functools
import importlib
from collections.abc import Mapping
from typing import Any, Self

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from vllm_overlay.multi_connector.counters import Counters
from vllm_overlay.multi_connector.harmless import harmless
from vllm_overlay.multi_connector.log_words import joined, words_of

OWN = "*"
"""The key of our own part among the children's names; no child may have this name."""


class OwnStats(KVConnectorStats):  # type: ignore[misc, unused-ignore]
    """The MultiConnector's own part: ``data`` is {"counters": {child name: Counters}, "classes": {child name: class}}.

    The class of a child, as "module:qualname", is there when the child has stats, so that another process can rebuild
    them without a registered name. On the wire counters are dictionaries.
    """

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        data = data or {}
        counters, classes = data.get("counters"), data.get("classes")
        super().__init__(
            data={
                "counters": {name: _counters(part) for name, part in counters.items()}
                if isinstance(counters, Mapping)
                else {},
                "classes": dict(classes) if isinstance(classes, Mapping) else {},
            }
        )

    @property
    def counters(self) -> dict[str, Counters]:
        counters: dict[str, Counters] = self.data["counters"]
        return counters

    @property
    def classes(self) -> dict[str, Any]:
        classes: dict[str, Any] = self.data["classes"]
        return classes

    def to_dict(self) -> dict[str, Any]:
        return {
            "counters": {name: part.to_dict() for name, part in self.counters.items() if not part.is_empty()},
            "classes": dict(self.classes),
        }

    def aggregate(self, other: KVConnectorStats) -> "OwnStats":
        assert isinstance(other, OwnStats)
        for name, part in other.counters.items():
            self.counters.setdefault(name, Counters()).add(part)
        self.classes.update(other.classes)
        return self

    def reset(self) -> None:
        self.counters.clear()

    def reduce(self) -> dict[str, Any]:
        return {name: words for name, part in self.counters.items() if (words := words_of(part))}

    def is_empty(self) -> bool:
        return all(part.is_empty() for part in self.counters.values())


def _counters(part: object) -> Counters:
    return part if isinstance(part, Counters) else Counters.from_dict(part)


class MultiStats(KVConnectorStats):  # type: ignore[misc, unused-ignore]
    """``data``: {child name: the child's own stats}, as the shipped MultiConnector has it, and OwnStats under OWN."""

    data: dict[str, KVConnectorStats]

    @classmethod
    def of(cls, name: str, counters: Counters, stats: KVConnectorStats | None, connector: object) -> "MultiStats":
        """One child's part, as its process sees it."""
        own = OwnStats({"counters": {name: counters}})
        if stats is None:
            return cls(data={OWN: own})
        connector_cls = type(connector)
        own.classes[name] = f"{connector_cls.__module__}:{connector_cls.__qualname__}"
        return cls(data={OWN: own, name: stats})

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Self:
        """From what ``to_dict`` wrote in another process. A child that cannot be rebuilt keeps our counters.

        A payload without our own part is none of ours: as with the shipped MultiConnector its names are those of
        registered connectors, and one that is not registered raises ValueError.
        """
        found: dict[str, KVConnectorStats] = {}
        own = data.get(OWN)
        if own is not None and not isinstance(own, OwnStats):
            own = OwnStats(own if isinstance(own, Mapping) else None)
        if own is not None:
            found[OWN] = own
        for name, part in data.items():
            if name == OWN:
                continue
            stats = _rebuilt(name, part, None if own is None else own.classes.get(name, ""))
            if stats is not None:
                found[name] = stats
        return cls(data=found)

    def to_dict(self) -> dict[str, Any]:
        wire: dict[str, Any] = {}
        for name, part in self.data.items():
            with harmless(f"Stats of connector {name!r} could not be written. They are lost."):
                wire[name] = part.to_dict()
        return wire

    def aggregate(self, other: KVConnectorStats) -> "MultiStats":
        for name, part in other.data.items():
            mine = self.data.setdefault(name, part)
            if mine is not part:
                with harmless(f"Stats of connector {name!r} could not be added up. Some are lost."):
                    self.data[name] = mine.aggregate(part)
        return self

    def reset(self) -> None:
        for name, part in self.data.items():
            with harmless(f"Stats of connector {name!r} could not be reset."):
                part.reset()

    def reduce(self) -> dict[str, Any]:
        """A few words on each child that has done something, ours and its own. vLLM writes them into one line."""
        own = self.data.get(OWN)
        reduced: dict[str, Any] = {} if own is None else own.reduce()
        for name, part in self.data.items():
            if name == OWN:
                continue
            with harmless(f"Stats of connector {name!r} could not be reduced. They are not logged."):
                if not part.is_empty() and (words := joined(reduced.get(name, {}), part.reduce())):
                    reduced[name] = words
        return reduced

    def is_empty(self) -> bool:
        for name, part in self.data.items():
            empty = False
            with harmless(
                f"Stats of connector {name!r} could not say whether they are empty. They count as not empty."
            ):
                empty = part.is_empty()
            if not empty:
                return False
        return True


class LoggedStats(MultiStats):
    """As vLLM's log has them, in the front end: empty also when there are numbers and nothing worth a line."""

    def is_empty(self) -> bool:
        return not self.reduce()


def _rebuilt(name: str, part: object, class_name: str | None) -> KVConnectorStats | None:
    """One child's stats from the wire. ``class_name`` is None where the payload says nothing of classes."""
    if isinstance(part, KVConnectorStats):
        return part
    registered = KVConnectorFactory.get_connector_class_by_name(name) if class_name is None else None
    with harmless(f"Stats of connector {name!r} could not be rebuilt. They are not logged."):
        cls: Any = registered if class_name is None else connector_class(*class_name.split(":", 1))
        stats: KVConnectorStats | None = cls.build_kv_connector_stats(data=part)
        return stats
    return None


@functools.cache
def connector_class(module: str, qualname: str) -> type[Any]:
    """A connector class by where it is defined; raises TypeError for anything else.

    The names come from our own engine process, which got the class from the configuration.
    """
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, KVConnectorBase_V1)):
        raise TypeError(f"{module}.{qualname} is not a KV connector")
    return found
