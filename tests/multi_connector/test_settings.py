# SPDX-License-Identifier: Apache-2.0
"""What a MultiConnector makes of its settings at start: children, refusals, the policy of failed loads, and the log."""

from contextlib import nullcontext

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.multi_connector.fakes import FAULTS, FakeChild, Panic, cache_config, child, multi, vllm_config
from vllm_overlay.config import ConfigError
from vllm_overlay.multi_connector import MultiConnector, children
from vllm_overlay.multi_connector.children import child_specs, load_failure_policy
from vllm_overlay.multi_connector.settings import multi_settings
from vllm_overlay.multi_connector.weights import LoadWeight


def specs(*children, **settings):
    return child_specs({"connectors": list(children), **settings}, kv_role="kv_both", engine_id="engine")


@pytest.fixture
def lines(monkeypatch):
    """What is logged at info: who the children are, then the policy of failed loads."""
    found = []
    monkeypatch.setattr(children.logger, "info", lambda message, *args: found.append(message % args))
    return found


def refusal(*children, **settings):
    with pytest.raises(ConfigError) as caught:
        specs(*children, **settings)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_weights_are_measured_by_default_and_read_per_child():
    found = specs(child(), child(weight=0), child(weight=2.5), child(weight="auto"))
    assert [spec.load_weight for spec in found] == [
        LoadWeight(0.8, is_measured=True),
        LoadWeight(0.0),
        LoadWeight(2.5),
        LoadWeight(0.8, is_measured=True),
    ]


def test_a_tier_says_what_its_weight_is_until_it_is_measured(tmp_path):
    found = specs(tier(tier="cpu"), tier(tier="disk", root=str(tmp_path)))
    assert [spec.load_weight.number for spec in found] == [0.95, 0.8]


@pytest.mark.parametrize(
    ("weights", "own", "warned"),
    [
        ((None, None), {}, 0),
        ((1, 0.5), {}, 0),
        ((1, None), {}, 1),
        ((None, 0.5), {}, 1),
        ((0, None), {}, 1),
        ((1, None), {"load": False}, 0),
    ],
)
def test_numbers_beside_measured_weights_are_warned_of(weights, own, warned, monkeypatch):
    lines = []
    monkeypatch.setattr(children.logger, "warning", lambda message, *args: lines.append(message % args))
    multi(child("a", weight=weights[0]), child("b", weight=weights[1], **own))
    assert len(lines) == warned
    assert all("load_weight of " in line and "is a number, and of " in line for line in lines)


def test_a_child_inherits_what_it_does_not_give():
    inherited, own = specs(child(), {**child(), "kv_role": "kv_consumer", "engine_id": "own"})
    assert (inherited.kv_transfer_config.kv_role, inherited.kv_transfer_config.engine_id) == ("kv_both", "engine")
    assert (own.kv_transfer_config.kv_role, own.kv_transfer_config.engine_id) == ("kv_consumer", "own")
    assert inherited.cls is FakeChild


def test_two_offloading_connectors_with_one_engine_id_are_refused_because_their_memory_has_that_name():
    offloading = {"kv_connector": "OffloadingConnector"}
    assert "have one engine_id, 'engine': give each its own, such as \"engine-2\"" in refusal(offloading, offloading)
    assert len(specs(offloading, {**offloading, "engine_id": "engine-2"})) == 2


@pytest.mark.parametrize(("engine", "own"), [("engine", "own"), ("engine_dp1", "own_dp1"), (None, "own")])
def test_a_childs_own_engine_id_is_another_one_in_each_data_parallel_rank(engine, own):
    """As vLLM's at the top: OffloadingConnector's memory has that name."""
    (spec,) = child_specs({"connectors": [{**child(), "engine_id": "own"}]}, kv_role="kv_both", engine_id=engine)
    assert spec.kv_transfer_config.engine_id == own


def test_a_child_has_its_own_copy_of_its_settings():
    entry = child("a", nested={"key": 1})
    (spec,) = specs(entry)
    spec.kv_transfer_config.kv_connector_extra_config["nested"]["key"] = 2
    assert entry["kv_connector_extra_config"]["nested"] == {"key": 1}
    assert spec.kv_transfer_config.kv_connector_extra_config["name"] == "a"


CPU = child("cpu")
NAMED = {"kv_connector_extra_config": {"name": "cpu"}}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({**CPU, "kv_role": "kv_all"}, "kv_role"),
        ({**CPU, "engine_id": 5}, "engine_id"),
        ({**CPU, "kv_connector": "NoSuchClass"}, "NoSuchClass not found in"),
        ({**CPU, "kv_connector": "child"}, "cannot be imported: it is no class"),
        ({**CPU, "kv_connector_module_path": "no.such.module"}, "in kv_connector_module_path='no.such.module' of"),
        ({**CPU, "kv_connector": None}, 'must be a class name, such as "NixlConnector"'),
        ({**CPU, "kv_conector": "x"}, "unknown setting 'kv_conector' of connector 'cpu': it takes kv_connector, "),
        ({**CPU, "kv_conector": "x"}, "; did you mean kv_connector?"),
        ({**CPU, "load_weight": 2.0}, "; load_weight belongs in this connector's kv_connector_extra_config"),
        ({**CPU, "max_load_attempts": 2}, "; max_load_attempts belongs in this connector's kv_connector_extra_config"),
        ({"kv_connector": "NixlConector", **NAMED}, "kv_connector='NixlConector' of connector 'cpu' is not registered"),
        ({"kv_connector": "NixlConector", **NAMED}, "module that has it; did you mean NixlConnector?"),
        ({"kv_connector": "MoRIIOConnector", **NAMED}, 'use "NixlConnector" here, or MoRIIOConnector without the'),
        (
            child("cpu", min_tokens=-1),
            "min_tokens=-1 of connector 'cpu' must be a whole number of at least 0, such as 0",
        ),
        (child("cpu", store="no"), "store='no' of connector 'cpu' must be true or false, such as true"),
        (child("cpu", promote=1), "promote=1 of connector 'cpu' must be true or false"),
        (
            child("cpu", max_load_attempts=0),
            "max_load_attempts=0 of connector 'cpu' must be a whole number of at least 1",
        ),
        (child("cpu", max_load_attempts="few"), "max_load_attempts='few' of connector 'cpu' must be a whole number"),
        *(
            (child("cpu", weight=weight), "of connector 'cpu' must be \"auto\" or a number of at least 0")
            for weight in (-1, "much", "nan", True, float("nan"), float("inf"), [])
        ),
    ],
)
def test_a_child_that_cannot_be_configured_is_refused_by_child(entry, words):
    sentence = refusal(entry)
    assert "connector 'cpu'" in sentence
    assert words in sentence


@pytest.mark.parametrize(
    ("entries", "settings", "words"),
    [
        ([CPU, CPU], {}, "two connectors of the MultiConnector have the name 'cpu': give each its own"),
        *(([child(name)], {}, 'must be a word such as "cpu"') for name in ("", 5, ["cpu"])),
        ([child("*")], {}, "is taken by the statistics"),
        ([{**child(), "kv_connector_extra_config": ["name"]}], {}, "must be a mapping"),
        *(
            ([], {"connectors": nobody}, "has no children: set kv_connector_extra_config.connectors to a list")
            for nobody in ([], None)
        ),
        *(
            ([], {"connectors": others}, 'must be a list of mappings, such as [{"kv_connector": "Offloading')
            for others in ({"kv_connector": "FakeChild"}, ["FakeChild"], "FakeChild")
        ),
        (
            [CPU],
            {"lookup_timeout": 1},
            "unknown setting 'lookup_timeout' of the MultiConnector: it takes connectors, lookup_timeout_ms, "
            "isolate_after_s, retry_first_s, retry_longest_s, hang_after_s, control_file, load_failure_policy; "
            "did you mean lookup_timeout_ms?",
        ),
        ([CPU], {"min_tokens": 5}, "; min_tokens belongs in the kv_connector_extra_config of each child"),
        ([CPU], {"lookup_timeout_ms": -1}, "lookup_timeout_ms=-1 of the MultiConnector must be a number of at least 0"),
        ([CPU], {"lookup_timeout_ms": "5 ms"}, "lookup_timeout_ms='5 ms' of the MultiConnector must be a number"),
        ([CPU], {"isolate_after_s": -1}, "isolate_after_s=-1 of the MultiConnector must be a number of at least 0"),
        ([CPU], {"load_failure_policy": "ignore"}, 'must be "fail" or "recompute", such as "recompute"'),
        (
            [CPU],
            {"retry_first_s": 5, "retry_longest_s": 1},
            "retry_longest_s=1 of the MultiConnector is less than retry_first_s=5: set retry_longest_s to at least 5",
        ),
        (
            [CPU],
            {"control_file": "/"},
            "control_file='/' of the MultiConnector is a directory: set it to a file, which need not be there yet, "
            'such as "/switches.json"',
        ),
        (
            [child("a", weight=0), child("b", weight=0)],
            {},
            "load_weight=0 of every connector of the MultiConnector (a, b), so that none would ever load: set "
            'load_weight of one to "auto" or above 0, or load of each to false',
        ),
    ],
)
def test_what_cannot_work_is_refused(entries, settings, words):
    assert words in refusal(*entries, **settings)


def test_a_control_file_and_its_directory_may_come_later(tmp_path):
    assert multi(child("a"), control_file=str(tmp_path / "no" / "such" / "switches.json"))


def test_equal_pauses_are_taken():
    assert multi_settings({"connectors": [child()], "retry_first_s": 2, "retry_longest_s": 2})
    assert multi_settings({"connectors": [child()], "retry_first_s": 120}).retry_longest_s == 120


@pytest.mark.parametrize(
    "children",
    [
        [child("a", weight=0), child("b", weight=0.5)],
        [child("a", weight=0, load=False), child("b", weight=0, load=False)],
    ],
)
def test_weights_of_zero_are_taken_where_something_may_load_or_nothing_should(children):
    assert specs(*children)


ROLES = ("kv_producer", "kv_consumer", "kv_both")
CONTRADICTIONS = {("kv_producer", "kv_consumer"), ("kv_consumer", "kv_producer")}


@pytest.mark.parametrize("own", ROLES)
@pytest.mark.parametrize("parents", ROLES)
def test_roles_that_share_nothing_are_refused_and_all_others_taken(parents, own):
    extra = {"connectors": [{**child("a"), "kv_role": own}]}
    if (parents, own) not in CONTRADICTIONS:
        assert child_specs(extra, kv_role=parents, engine_id=None)
        return
    with pytest.raises(ConfigError) as caught:
        child_specs(extra, kv_role=parents, engine_id=None)
    assert str(caught.value) == (
        f"kv_role={own!r} of connector 'a' contradicts kv_role={parents!r} of the MultiConnector: "
        'set kv_role of the MultiConnector to "kv_both"'
    )


@pytest.mark.parametrize(
    ("own", "num_steps", "is_taken"), [("kv_both", 2, False), ("kv_both", 1, True), ("kv_producer", 2, True)]
)
def test_a_child_may_not_load_below_one_that_only_stores_while_another_step_is_under_way(own, num_steps, is_taken):
    config = vllm_config({**child("a"), "kv_role": own})
    config.kv_transfer_config.kv_role, config.max_concurrent_batches = "kv_producer", num_steps
    refusal = pytest.raises(ConfigError, match=r"kv_role='kv_both' of connector 'a' .*: set kv_role .* to \"kv_both\"")
    with nullcontext() if is_taken else refusal:
        MultiConnector(config, KVConnectorRole.SCHEDULER, cache_config())


def test_a_child_without_hybrid_support_is_refused_by_name_while_the_hybrid_manager_is_on():
    with pytest.raises(ConfigError, match=r"connector 'old' .* set --disable-hybrid-kv-cache-manager"):
        multi(child("a"), child("old", "PlainChild"))


def test_a_child_without_hybrid_support_is_taken_while_the_hybrid_manager_is_off():
    assert len(multi(child("a"), child("old", "PlainChild"), hybrid=False).sub_connectors) == 2


@pytest.mark.parametrize("error", FAULTS)
def test_a_child_that_cannot_be_built_is_named_and_the_built_ones_are_shut_down(error):
    built = []
    original = FakeChild.__init__

    def spy(self, *args):
        original(self, *args)
        built.append(self)

    FakeChild.__init__ = spy
    try:
        with pytest.raises(RuntimeError, match="connector 'b' of the MultiConnector failed in __init__"):
            multi(child("a"), child("b", boom=error))
    finally:
        FakeChild.__init__ = original
    assert built[0].called("shutdown") == [[]]


def test_a_child_is_not_shown_the_switches_that_are_ours():
    (spec,) = specs(child("cpu", min_tokens=5, store=False, load=True, promote=False, own=1))
    assert spec.kv_transfer_config.kv_connector_extra_config == {"name": "cpu", "own": 1}
    assert (spec.settings.min_tokens, spec.settings.store, spec.settings.promote) == (5, False, False)


def test_attempts_are_each_childs_own_and_the_child_is_shown_them_like_its_weight():
    default, own = specs(child("cpu"), child("disk", max_load_attempts=5, weight=2.0))
    assert (default.settings.max_load_attempts, own.settings.max_load_attempts) == (3, 5)
    assert own.kv_transfer_config.kv_connector_extra_config == {
        "name": "disk",
        "load_weight": 2.0,
        "max_load_attempts": 5,
    }


def test_a_child_whose_module_panics_while_it_is_imported_is_refused_by_child(monkeypatch):
    def panic(config):
        raise Panic("from native code")

    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", panic)
    assert refusal(child("cpu")) == (
        "kv_connector='FakeChild' in kv_connector_module_path='tests.multi_connector.fakes' of connector 'cpu' cannot "
        "be imported: from native code"
    )


def test_the_first_line_names_children_classes_weights_and_what_is_not_by_default(lines, tmp_path):
    switches = tmp_path / "switches.json"
    multi(
        child("cpu"),
        child("disk", "NamedChild", weight=0.8, store=False, min_tokens=512),
        child("far", weight=2, load=False, promote=False),
        child("plain", weight=1.0),
        control_file=str(switches),
    )
    assert lines[0] == (
        "MultiConnector: cpu (FakeChild, weight auto, 0.8 until measured), "
        "disk (NamedChild, weight 0.8, store off, min_tokens 512), "
        f"far (FakeChild, weight 2, load off, promote off), plain (FakeChild, weight 1); control file {switches}"
    )


# Whose word counts when a load fails.


@pytest.mark.parametrize(
    ("own", "at_top", "failing", "value", "word"),
    [
        (None, "fail", [], "recompute", "that is the default"),
        (None, "recompute", [], "recompute", "kv_load_failure_policy of --kv-transfer-config"),
        (None, "fail", ["a", "c"], "fail", "connector a, c"),
        (None, "recompute", ["a"], "recompute", "kv_load_failure_policy of --kv"),
        ("fail", "recompute", [], "fail", "load_failure_policy of the MultiConnector"),
        ("recompute", "fail", ["a"], "recompute", "load_failure_policy of the MultiConnector"),
    ],
)
def test_whose_word_counts(own, at_top, failing, value, word):
    policy = load_failure_policy(own, at_top, failing)
    assert policy.value == value
    assert policy.reason.startswith(word)


def failing(name):
    return {**child(name), "kv_load_failure_policy": "fail"}


@pytest.mark.parametrize(
    ("children", "settings", "value"),
    [
        ([child("a"), child("b")], {}, "recompute"),
        ([child("a"), failing("b")], {}, "fail"),
        ([child("a"), failing("b")], {"load_failure_policy": " Recompute"}, "recompute"),
        ([child("a"), child("b")], {"load_failure_policy": "FAIL"}, "fail"),
        ([child("a", load_failure_policy="fail")], {}, "recompute"),  # that setting is only known to be one of ours
    ],
)
def test_the_policy_is_the_engines_and_every_childs_and_is_logged_once(children, settings, value, lines):
    config = vllm_config(*children, **settings)
    MultiConnector(config, KVConnectorRole.WORKER, cache_config())  # in one process, with one configuration
    assert lines == [] and config.kv_transfer_config.kv_load_failure_policy == "fail"
    built = MultiConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    assert config.kv_transfer_config.kv_load_failure_policy == value
    assert {one._kv_transfer_config.kv_load_failure_policy for one in built.sub_connectors} == {value}
    _, line = lines
    assert line.startswith(f"kv_load_failure_policy is {value!r} for all connectors of the MultiConnector")


def test_what_a_child_makes_of_its_own_copy_of_the_configuration_counts_for_nothing():
    config = vllm_config(failing("a"), child("b", wants_recompute=True))
    MultiConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"


# What a child is called when nobody says it, and settings of our own tiers.

STORE = "tests.tiers.store_tier:StoreTierSpec"


def tier(**settings):
    """A child of ours, found without the plug-in."""
    module = "vllm_overlay.connector.connector"
    own = {"kv_connector": "HybridOffloadConnector", "kv_connector_module_path": module}
    return {**own, "kv_connector_extra_config": settings}


def test_a_child_is_called_by_its_name_else_its_tier_else_its_class(tmp_path):
    found = specs(
        tier(tier="cpu"),
        tier(tier="disk", root=str(tmp_path / "one")),
        tier(tier="disk", root=str(tmp_path / "two")),
        tier(tier=STORE, shelf="top"),
        tier(tier="cpu", name="small"),
        child(),
        child(tier="cpu"),
    )
    names = ["cpu", "disk", "disk#2", STORE, "small", "FakeChild", "FakeChild#2"]
    assert [spec.name for spec in found] == names
    shown = [spec.kv_transfer_config.kv_connector_extra_config.get("name") for spec in found]
    assert shown == [*names[:5], None, None]


def test_a_default_name_gives_way_to_a_given_one():
    assert [spec.name for spec in specs(tier(tier="cpu"), tier(tier="cpu", name="cpu"))] == ["cpu#2", "cpu"]


def test_a_childs_own_word_counts_in_capitals_too():
    (spec,) = specs(tier(tier="cpu", load_failure_policy=" Fail"))
    assert spec.load_failure_policy.value == "fail"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "connector 'HybridOffloadConnector': tier is not set: set kv_connector_extra_config.tier to \"cpu\" or"),
        ({"tier": "dsk"}, "connector 'dsk': tier='dsk' is not known: set it to \"cpu\" or \"disk\", or to"),
        ({"tier": "disk"}, "connector 'disk': root of the disk tier is not set: set it to a string that is not empty"),
        ({"tier": "cpu", "name": "a", "capacity": 1}, "connector 'a': unknown setting 'capacity' of the cpu tier"),
    ],
)
def test_a_setting_of_a_tier_is_refused_before_anything_is_built(settings, sentence):
    with pytest.raises(ConfigError) as caught:
        specs(tier(**settings))
    assert str(caught.value).startswith(sentence)


def test_two_children_on_one_root_are_refused_whatever_it_is_called(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(ConfigError) as caught:
        specs(tier(tier="disk", root=str(root)), tier(tier="disk", root=str(tmp_path / "link" / "..." / "..")))
    assert str(caught.value) == (
        f"connectors 'disk' and 'disk#2' of the MultiConnector have one root, '{root}': give each its own, such as "
        f'"{root}-2"'
    )
