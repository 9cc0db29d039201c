# SPDX-License-Identifier: Apache-2.0
import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from tests.engine.client import cpu_child, disk_child
from tests.multi_connector.fakes import FAULTS, FakeChild, Panic, child, multi
from vllm_overlay.config import ConfigError
from vllm_overlay.multi_connector import children
from vllm_overlay.multi_connector.children import child_specs
from vllm_overlay.multi_connector.settings import multi_settings
from vllm_overlay.multi_connector.weights import LoadWeight


def specs(*children, **settings):
    return child_specs({"connectors": list(children), **settings}, kv_role="kv_both", engine_id="engine")


def refusal(*children, **settings):
    with pytest.raises(ConfigError) as caught:
        specs(*children, **settings)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_names_default_to_the_class_and_are_made_unique():
    assert [spec.name for spec in specs(child(), child("cpu"), child(), child())] == [
        "FakeChild",
        "cpu",
        "FakeChild#2",
        "FakeChild#3",
    ]


def test_a_default_name_avoids_the_given_ones():
    assert [spec.name for spec in specs(child(), child("FakeChild"))] == ["FakeChild#2", "FakeChild"]


def test_weights_are_measured_by_default_and_read_per_child():
    found = specs(child(), child(weight=0), child(weight=2.5), child(weight="auto"))
    assert [spec.load_weight for spec in found] == [
        LoadWeight(0.8, is_measured=True),
        LoadWeight(0.0),
        LoadWeight(2.5),
        LoadWeight(0.8, is_measured=True),
    ]


def test_a_tier_says_what_its_weight_is_until_it_is_measured(tmp_path):
    tiers = [
        {**tier, "kv_connector_module_path": "vllm_overlay.connector.connector"}
        for tier in (cpu_child(load_weight="auto"), disk_child(tmp_path, load_weight="auto"))
    ]
    assert [spec.load_weight.number for spec in specs(*tiers)] == [0.95, 0.8]


@pytest.mark.parametrize(
    ("weights", "warned"),
    [((None, None), 0), ((1, 0.5), 0), ((1, None), 1), ((None, 0.5), 1), ((0, None), 1)],
)
def test_numbers_beside_measured_weights_are_warned_of(weights, warned, monkeypatch):
    lines = []
    monkeypatch.setattr(children.logger, "warning", lambda message, *args: lines.append(message % args))
    multi(child("a", weight=weights[0]), child("b", weight=weights[1]))
    assert len(lines) == warned
    assert all("load_weight of " in line and "is a number, and of " in line for line in lines)


def test_a_child_that_never_loads_is_not_warned_of(monkeypatch):
    lines = []
    monkeypatch.setattr(children.logger, "warning", lambda *message: lines.append(message))
    multi(child("a", weight=1), child("b", load=False))
    assert not lines


def test_a_child_inherits_what_it_does_not_give():
    inherited, own = specs(child(), {**child(), "kv_role": "kv_consumer", "engine_id": "own"})
    assert (inherited.kv_transfer_config.kv_role, inherited.kv_transfer_config.engine_id) == ("kv_both", "engine")
    assert (own.kv_transfer_config.kv_role, own.kv_transfer_config.engine_id) == ("kv_consumer", "own")
    assert inherited.cls is FakeChild


def test_a_child_has_its_own_copy_of_its_settings():
    entry = child("a", nested={"key": 1})
    (spec,) = specs(entry)
    spec.kv_transfer_config.kv_connector_extra_config["nested"]["key"] = 2
    assert entry["kv_connector_extra_config"]["nested"] == {"key": 1}
    assert spec.kv_transfer_config.kv_connector_extra_config["name"] == "a"


@pytest.mark.parametrize("settings", [{}, {"connectors": []}, {"connectors": None}])
def test_no_children_is_refused(settings):
    with pytest.raises(ConfigError, match=r"has no children: set kv_connector_extra_config\.connectors to a list"):
        child_specs(settings, kv_role="kv_both", engine_id=None)


def test_two_children_of_one_name_are_refused():
    assert refusal(child("cpu"), child("cpu")) == (
        "two connectors of the MultiConnector have the name 'cpu': give each its own"
    )


@pytest.mark.parametrize("weight", [-1, "much", "nan", True, float("nan"), float("inf"), []])
def test_a_weight_that_is_none_is_refused_by_child(weight):
    assert "of connector 'cpu' must be \"auto\" or a number of at least 0" in refusal(child("cpu", weight=weight))


def test_an_unknown_key_of_a_child_is_refused_by_child():
    assert "unknown setting 'kv_conector' of connector 'cpu': it takes " in refusal(
        {**child("cpu"), "kv_conector": "x"}
    )


def test_a_setting_of_the_child_in_the_wrong_place_is_refused_with_the_place():
    sentence = refusal({**child("cpu"), "load_weight": 2.0})
    assert sentence.startswith("unknown setting 'load_weight' of connector 'cpu': it takes kv_connector, ")
    assert sentence.endswith("; load_weight belongs in this connector's kv_connector_extra_config")


NAMED = {"kv_connector_extra_config": {"name": "cpu"}}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({**child("cpu"), "kv_role": "kv_all"}, "kv_role"),
        ({**child("cpu"), "engine_id": 5}, "engine_id"),
        ({**child("cpu"), "kv_connector": "NoSuchClass"}, "NoSuchClass not found in"),
        ({**child("cpu"), "kv_connector": "child"}, "cannot be imported: it is no class"),
        (
            {**child("cpu"), "kv_connector_module_path": "no.such.module"},
            "in kv_connector_module_path='no.such.module' of",
        ),
        ({**child("cpu"), "kv_connector": None}, 'must be a class name, such as "NixlConnector"'),
        ({**child("cpu"), "kv_conector": "x"}, "; did you mean kv_connector?"),
        ({"kv_connector": "NixlConector", **NAMED}, "kv_connector='NixlConector' of connector 'cpu' is not registered"),
        ({"kv_connector": "NixlConector", **NAMED}, "module that has it; did you mean NixlConnector?"),
        ({"kv_connector": "MoRIIOConnector", **NAMED}, 'use "NixlConnector" here, or MoRIIOConnector without the'),
    ],
)
def test_a_child_that_cannot_be_configured_is_refused_by_child(entry, words):
    sentence = refusal(entry)
    assert "connector 'cpu'" in sentence
    assert words in sentence


@pytest.mark.parametrize("name", ["", 5, ["cpu"]])
def test_a_name_that_is_none_is_refused(name):
    assert 'must be a word such as "cpu"' in refusal(child(name))


def test_extra_config_that_is_no_mapping_is_refused():
    assert "must be a mapping" in refusal({**child(), "kv_connector_extra_config": ["name"]})


def test_an_unknown_setting_is_refused():
    assert refusal(child(), lookup_timeout=1) == (
        "unknown setting 'lookup_timeout' of the MultiConnector: it takes connectors, "
        "lookup_timeout_ms, isolate_after_s, retry_first_s, retry_longest_s, hang_after_s, "
        "control_file, load_failure_policy; did you mean lookup_timeout_ms?"
    )


def test_a_setting_of_a_child_beside_the_children_is_refused_with_the_place():
    assert refusal(child(), min_tokens=5).endswith(
        "; min_tokens belongs in the kv_connector_extra_config of each child"
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lookup_timeout_ms": -1}, "lookup_timeout_ms=-1 of the MultiConnector must be a number of at least 0"),
        ({"lookup_timeout_ms": "5 ms"}, "lookup_timeout_ms='5 ms' of the MultiConnector must be a number"),
        ({"isolate_after_s": -1}, "isolate_after_s=-1 of the MultiConnector must be a number of at least 0"),
        ({"load_failure_policy": "ignore"}, 'must be "fail" or "recompute", such as "recompute"'),
        (
            {"retry_first_s": 5, "retry_longest_s": 1},
            "retry_longest_s=1 of the MultiConnector is less than retry_first_s=5: set retry_longest_s to at least 5",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings, sentence):
    assert sentence in refusal(child(), **settings)


@pytest.mark.parametrize("connectors", [{"kv_connector": "FakeChild"}, ["FakeChild"], "FakeChild"])
def test_children_that_are_no_list_of_mappings_are_refused(connectors):
    with pytest.raises(ConfigError, match=r'must be a list of mappings, such as \[\{"kv_connector": "Offloading'):
        multi_settings({"connectors": connectors})


def test_equal_pauses_are_taken():
    assert multi_settings({"connectors": [child()], "retry_first_s": 2, "retry_longest_s": 2})
    assert multi_settings({"connectors": [child()], "retry_first_s": 120}).retry_longest_s == 120


def test_a_directory_as_control_file_is_refused(tmp_path):
    assert refusal(child(), control_file=str(tmp_path)) == (
        f"control_file={str(tmp_path)!r} of the MultiConnector is a directory: set it to a file, which need not be "
        f'there yet, such as "{tmp_path}/switches.json"'
    )


def test_a_control_file_may_come_later(tmp_path):
    assert multi(child("a"), control_file=str(tmp_path / "later.json"))


def test_the_directory_of_a_control_file_may_come_later_too(tmp_path):
    path = str(tmp_path / "no" / "such" / "switches.json")
    assert multi(child("a"), control_file=path)


def test_weights_of_zero_throughout_are_refused():
    assert refusal(child("a", weight=0), child("b", weight=0)) == (
        "load_weight=0 of every connector of the MultiConnector (a, b), so that none would ever load: set load_weight "
        'of one to "auto" or above 0, or load of each to false'
    )


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


def test_children_get_configurations_of_their_own():
    a, b = multi(child("a"), child("b")).sub_connectors
    assert a._vllm_config is not b._vllm_config
    assert a._kv_transfer_config.kv_connector_extra_config["name"] == "a"
    assert b._kv_transfer_config.kv_connector_extra_config["name"] == "b"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"min_tokens": -1}, "min_tokens=-1 of connector 'cpu' must be a whole number of at least 0, such as 0"),
        ({"store": "no"}, "store='no' of connector 'cpu' must be true or false, such as true"),
        ({"promote": 1}, "promote=1 of connector 'cpu' must be true or false"),
        (
            {"max_load_attempts": 0},
            "max_load_attempts=0 of connector 'cpu' must be a whole number of at least 1, such as 3",
        ),
        ({"max_load_attempts": "few"}, "max_load_attempts='few' of connector 'cpu' must be a whole number"),
    ],
)
def test_a_switch_of_a_child_that_is_none_is_refused_by_child(given, words):
    assert words in refusal(child("cpu", **given))


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


def test_attempts_beside_the_childs_own_settings_are_refused_with_the_place():
    sentence = refusal({**child("cpu"), "max_load_attempts": 2})
    assert sentence.endswith("; max_load_attempts belongs in this connector's kv_connector_extra_config")


def test_a_child_whose_module_panics_while_it_is_imported_is_refused_by_child(monkeypatch):
    def panic(config):
        raise Panic("from native code")

    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", panic)
    assert refusal(child("cpu")) == (
        "kv_connector='FakeChild' in kv_connector_module_path='tests.multi_connector.fakes' of connector 'cpu' cannot "
        "be imported: from native code"
    )


def test_the_name_of_our_own_statistics_is_no_childs():
    assert "is taken by the statistics" in refusal(child("*"))
