# SPDX-License-Identifier: Apache-2.0
"""No import circle, and imports between rooms run one way (docs/architecture.md)."""

import sys
from dataclasses import dataclass, replace

import pytest

from tests import rooms
from tests.rooms import Module

OURS = "vllm_overlay"


@dataclass(slots=True, frozen=True)
class Rule:
    """What one room may import.

    Of this package: itself and ``allowed``, or all but ``forbidden``. Of others: all but ``without``.
    """

    room: str
    allowed: tuple[str, ...] | None = None
    forbidden: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    only_standard_library: bool = False


NO_ENGINE = ("torch", "vllm")
RULES = (
    Rule("versions", allowed=(), only_standard_library=True),
    Rule("common", allowed=(), only_standard_library=True),
    Rule("patching", allowed=("common", "versions"), only_standard_library=True),
    Rule("settings", allowed=("common", "config", "named_child", "plugin")),
    Rule("planner", allowed=("common",), without=NO_ENGINE),
    Rule("tiers", allowed=("planner", "common", "config", "settings", "versions"), without=NO_ENGINE),
    Rule("transfer", allowed=("planner", "common", "tiers.memory")),
    Rule("offloading", forbidden=("multi_connector", "transfer", "planning", "cli", "server")),
    Rule("multi_connector", forbidden=("connector", "tiers", "transfer", "planner")),
    Rule("server", allowed=("metrics",), without=NO_ENGINE),
    Rule("verification", allowed=("common", "server", "metrics"), without=NO_ENGINE),
    Rule("planning", allowed=("planner", "tiers", "config"), without=NO_ENGINE),
    Rule("cli", forbidden=("connector", "multi_connector", "transfer", "dry_start"), without=NO_ENGINE),
)
NOT_SHIPPED = ("tests", "tools", "devtools", "bench")


def is_below(name: str, tops: tuple[str, ...]) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def full(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{OURS}.{name}" for name in names)


def is_wrong(rule: Rule, target: str) -> bool:
    if is_below(target, (OURS,)):
        if rule.allowed is not None and not is_below(target, full((rule.room, *rule.allowed))):
            return True
        return is_below(target, full(rule.forbidden))
    if rule.only_standard_library and target.split(".")[0] not in sys.stdlib_module_names:
        return True
    return is_below(target, rule.without)


def wrong_arrows(modules: list[Module]) -> set[tuple[str, str]]:
    """Also imports in functions and under TYPE_CHECKING: a room must not know the other one at all."""
    return {
        (arrow.source, arrow.target)
        for arrow in rooms.arrows_of(modules)
        if is_below(arrow.target, NOT_SHIPPED)
        or any(is_below(arrow.source, full((rule.room,))) and is_wrong(rule, arrow.target) for rule in RULES)
    }


def modules_of_tree() -> list[Module]:
    return list(rooms.modules_of(OURS))


def test_no_modules_import_each_other() -> None:
    assert rooms.circle_of(modules_of_tree()) == []


def test_imports_between_rooms_run_one_way() -> None:
    assert wrong_arrows(modules_of_tree()) == set()


def test_every_room_of_a_rule_is_there() -> None:
    names = tuple(module.name for module in modules_of_tree())
    assert [rule.room for rule in RULES if f"{OURS}.{rule.room}" not in names] == []


@pytest.mark.parametrize(
    ("module", "line", "target"),
    [
        ("common.reasons", "from vllm_overlay.config import GIB", "vllm_overlay.config"),
        ("common.backoff", "import msgspec", "msgspec"),
        ("settings.check", "from vllm_overlay.tiers import cpu", "vllm_overlay.tiers.cpu"),
        ("versions", "import vllm_overlay.config", "vllm_overlay.config"),
        ("planner.coverage", "from vllm_overlay.tiers.index import PrefixIndex", "vllm_overlay.tiers.index"),
        ("planner.coverage", "import torch", "torch"),
        ("transfer.cpu", "from vllm_overlay.tiers import index", "vllm_overlay.tiers.index"),
        ("tiers.base", "from vllm_overlay.connector.metadata import LoadJob", "vllm_overlay.connector.metadata"),
        ("tiers.disk.recovery.inspection", "def f():\n    import vllm.envs", "vllm.envs"),
        ("multi_connector.child", "import vllm_overlay.planner.objects", "vllm_overlay.planner.objects"),
        ("patching.diff", "import numpy", "numpy"),
        ("patching.diff", "from vllm_overlay import plugin", "vllm_overlay.plugin"),
        ("server.api_client", "from vllm_overlay.verification import prompts", "vllm_overlay.verification.prompts"),
        ("verification.prompts", "import vllm", "vllm"),
        ("planning.ask_vllm", "import vllm.config", "vllm.config"),
        ("planning.capacity", "from vllm_overlay.connector import metadata", "vllm_overlay.connector.metadata"),
        ("cli.stats", "from vllm_overlay.transfer import base", "vllm_overlay.transfer.base"),
        ("config", "from tests.strategies import layouts", "tests.strategies"),
        ("plugin", "import devtools.suites", "devtools.suites"),
    ],
)
def test_a_planted_wrong_arrow_is_found(module: str, line: str, target: str) -> None:
    planted = [
        replace(found, text=f"{found.text}\n{line}\n" if found.name == f"{OURS}.{module}" else "")
        for found in modules_of_tree()
    ]
    assert (f"{OURS}.{module}", target) in wrong_arrows(planted)
