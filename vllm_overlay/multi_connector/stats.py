# SPDX-License-Identifier: Apache-2.0
"""Numbers for each child under its configured name, from any process to the front end.

Two children of one class stay apart, and a child loaded by module path works. Nothing here raises into the engine or
into the loop that serves metrics. What cannot be added up or exported is dropped and logged once.
"""

import functools
import importlib
from collections.abc import Mapping
from itertools import islice
from typing import Any, Self

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from vllm_overlay.common.log_summary import hit_rate, present
from vllm_overlay.multi_connector.child import harmless
from vllm_overlay.multi_connector.lifecycle import Phase
from vllm_overlay.tally import Tally

OWN = "*"
"""The key of our own part among the children's names; no child may have this name."""
MOST_WORDS = 20
"""How many words of its own a child may add to vLLM's log line. Somebody else's connector may have much to say."""
_PHASES = {phase.value: phase.name.lower().replace("_", " ") for phase in Phase if phase is not Phase.SERVING}


def _words(tally: Tally) -> dict[str, Any]:
    """What vLLM's log line says of a child: nothing when it was not asked and nothing is wrong with it."""
    tokens, seconds = tally.total("loaded_tokens"), tally.histograms.get("load_seconds")
    return present(
        hit=hit_rate(tally.total("offered_tokens"), tally.total("asked_tokens")),
        loaded=f"{tokens} tokens{f' in {seconds.sum:.3f} s' if seconds else ''}" if tokens else "",
        ignored_tokens=tally.total("ignored_offer_tokens"),
        failed_loads=tally.total("failed_loads"),
        exceptions=tally.total("errors"),
        hangs=tally.total("hangs"),
        state=_PHASES.get(tally.gauges.get("state"), ""),
    )


class MultiStats(KVConnectorStats):  # type: ignore[misc, unused-ignore]
    """``data``: {child name: the child's own stats}, as the shipped MultiConnector has it; what we count is beside."""

    data: dict[str, KVConnectorStats]

    def __init__(self, data: dict[str, KVConnectorStats] | None = None) -> None:
        super().__init__({} if data is None else data)
        self.tallies: dict[str, Tally] = {}
        """What we count of each child, by its name."""
        self.classes: dict[str, str] = {}
        """Child that has stats -> its class as "module:qualname": so another process rebuilds them without a registered
        name."""

    def put(self, name: str, tally: Tally, stats: KVConnectorStats | None, connector: object) -> None:
        """One child's part, as its process sees it."""
        self.tallies[name] = tally
        if stats is not None:
            self.data[name] = stats
            self.classes[name] = f"{type(connector).__module__}:{type(connector).__qualname__}"

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Self:
        """From what ``to_dict`` wrote in another process. A child that cannot be rebuilt keeps our tally.

        A payload without our own part is none of ours: as with the shipped MultiConnector its names are those of
        registered connectors, and one that is not registered raises ValueError.
        """
        found, parts = cls(), dict(data)
        if (own := parts.pop(OWN, None)) is not None:
            found.tallies, found.classes = tallies_of(own), own["classes"]
        for name, part in parts.items():
            stats = _rebuilt(name, part, None if own is None else found.classes.get(name, ""))
            if stats is not None:
                found.data[name] = stats
        return found

    def to_dict(self) -> dict[str, Any]:
        wire: dict[str, Any] = {}
        if self.tallies or self.classes:
            tallies = {name: tally.to_dict() for name, tally in self.tallies.items() if not tally.is_empty()}
            wire[OWN] = {"tallies": tallies, "classes": self.classes}
        for name, part in self.data.items():
            with harmless(f"Stats of connector {name!r} could not be written. They are lost."):
                wire[name] = part.to_dict()
        return wire

    def aggregate(self, other: KVConnectorStats) -> "MultiStats":
        assert isinstance(other, MultiStats)
        for name, tally in other.tallies.items():
            self.tallies.setdefault(name, Tally()).add(tally)
        self.classes.update(other.classes)
        for name, part in other.data.items():
            mine = self.data.setdefault(name, part)
            if mine is not part:
                with harmless(f"Stats of connector {name!r} could not be added up. Some are lost."):
                    self.data[name] = mine.aggregate(part)
        return self

    def reset(self) -> None:
        self.tallies.clear()
        for name, part in self.data.items():
            with harmless(f"Stats of connector {name!r} could not be reset."):
                part.reset()

    def reduce(self) -> dict[str, Any]:
        """A few words on each child that has done something. vLLM writes them into one line.

        Ours come first, then the child's own. Where both have a word, ours holds.
        """
        reduced = {name: words for name, tally in self.tallies.items() if (words := _words(tally))}
        for name, part in self.data.items():
            with harmless(f"Stats of connector {name!r} could not be reduced. They are not logged."):
                ours = reduced.get(name, {})
                theirs = {} if part.is_empty() else part.reduce()
                more = ((word, value) for word, value in theirs.items() if word not in ours)
                if words := {**ours, **dict(islice(more, MOST_WORDS))}:
                    reduced[name] = words
        return reduced

    def is_empty(self) -> bool:
        if not all(tally.is_empty() for tally in self.tallies.values()):
            return False
        for name, part in self.data.items():
            with harmless(f"Stats of connector {name!r} could not say whether they are empty. They count as not."):
                if part.is_empty():
                    continue
            return False
        return True


class LoggedStats(MultiStats):
    """As vLLM's log has them, in the front end: empty also when there are numbers and nothing worth a line."""

    def is_empty(self) -> bool:
        return not self.reduce()


def tallies_of(own: Mapping[str, Any]) -> dict[str, Tally]:
    """Our part of what ``MultiStats.to_dict`` wrote in another process, by children's names."""
    return {name: Tally.from_dict(tally) for name, tally in own["tallies"].items()}


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
