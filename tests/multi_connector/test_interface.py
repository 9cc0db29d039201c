# SPDX-License-Identifier: Apache-2.0
"""Generated from vLLM's connector interface by introspection: a hook that a later vLLM adds fails here first."""

import contextlib
import inspect
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from tests.multi_connector.fakes import (
    ENDINGS,
    FAULTS,
    Boom,
    FakeChild,
    blocks,
    child,
    multi,
    public_hooks,
    request,
    scheduler_output,
    vllm_config,
    worker,
)
from tests.multi_connector.faulty import AT_RETURN
from tests.multi_connector.lockstep import by_label
from vllm_overlay.multi_connector import MultiConnector
from vllm_overlay.multi_connector.child import Child
from vllm_overlay.multi_connector.hooks import HOOKS, NOT_CALLED
from vllm_overlay.multi_connector.metadata import MultiHandshakeMetadata, MultiMetadata

INHERITED = {"role", "has_connector_metadata"}
CLASS_LEVEL = {name for name, member in public_hooks().items() if isinstance(member, classmethod)}
STARTUP = {
    "bind_gpu_block_pool",
    "bind_kv_cache_manager",
    "get_finished_count",
    "get_handshake_metadata",
    "get_mem_pool_context",
    "register_kv_caches",
    "requires_kv_delivery",
    "set_host_xfer_buffer_ops",
    "set_xfer_handshake_metadata",
    "set_xfer_handshake_metadata_pp_aware",
}
RUNTIME = sorted(set(public_hooks()) - INHERITED - CLASS_LEVEL - STARTUP)
METADATA = MultiMetadata((None, None))
HANDSHAKE = MultiHandshakeMetadata(("a", "b"))

ARGUMENTS = {
    "bind_connector_metadata": lambda: (METADATA,),
    "bind_gpu_block_pool": lambda: ("pool",),
    "bind_kv_cache_manager": lambda: (SimpleNamespace(block_pool="pool"),),
    "build_connector_meta": lambda: (scheduler_output(),),
    "completes_local_attention": lambda: (request(),),
    "get_external_cache_hit_sources": lambda: (request(), 16),
    "get_finished": lambda: (set(),),
    "get_loaded_kv_cache_group_ids": lambda: (request(),),
    "get_num_new_matched_tokens": lambda: (request(), 0),
    "get_transfer_results": lambda: (set(),),
    "handle_preemptions": lambda: (METADATA,),
    "on_new_request": lambda: (request(),),
    "register_finished_partial_tail": lambda: (request(), ([1],), [(0, 1, 12)]),
    "register_kv_caches": lambda: ({},),
    "request_finished": lambda: (request(), [1]),
    "request_finished_all_groups": lambda: (request(), ([1],)),
    "save_kv_layer": lambda: ("layer", None, None),
    "set_host_xfer_buffer_ops": lambda: (None,),
    "set_xfer_handshake_metadata": lambda: ({0: HANDSHAKE},),
    "set_xfer_handshake_metadata_pp_aware": lambda: ({(0, 0): HANDSHAKE},),
    "start_load_kv": lambda: ("context",),
    "update_connector_output": lambda: (KVConnectorOutput(),),
    "update_state_after_alloc": lambda: (request(), blocks(1), 0),
    "wait_for_layer_load": lambda: ("layer",),
}
"""What each hook that takes something is called with."""

CHILDS_NAME = {"request_finished": "request_finished_all_groups", "get_finished": "get_transfer_results"}
"""Hooks of ours that reach the children under another name."""
CHOSEN_ONLY = {"completes_local_attention", "get_external_cache_hit_sources", "get_loaded_kv_cache_group_ids"}


def ours():
    connector = multi()
    for index, fake in enumerate(connector.sub_connectors):
        fake.answers["get_num_new_matched_tokens"] = (16 if index == 0 else 0, True)
        fake.answers["supports_divergent_local_hybrid_hits"] = True  # so that the second child is asked too
    connector.get_num_new_matched_tokens(request(), 0)  # so that the first child is chosen
    for fake in connector.sub_connectors:
        fake.calls.clear()
    return connector


def use(connector, hook):
    if isinstance(inspect.getattr_static(MultiConnector, hook), property):
        return getattr(connector, hook)
    if hook == "get_block_ids_with_load_errors":
        connector.get_transfer_results(set())  # as vLLM does, and where the children are asked
    answer = getattr(connector, hook)(*ARGUMENTS.get(hook, tuple)())
    return list(answer) if hook == "take_events" else answer


@pytest.mark.parametrize("hook", sorted(public_hooks()))
def test_every_hook_of_the_interface_is_overridden_or_excused(hook):
    assert hook in MultiConnector.__dict__ or hook in INHERITED


def test_the_metric_label_has_every_hook_that_a_child_meets_while_it_serves_or_comes_back():
    serving = {CHILDS_NAME.get(hook, hook) for hook in RUNTIME} | {"request_finished"}  # of a child without SupportsHMA
    at_return = set(AT_RETURN) - set(NOT_CALLED)
    assert set(HOOKS) == serving | at_return
    assert set(NOT_CALLED) <= set(public_hooks())


@pytest.mark.parametrize("hook", [*RUNTIME, *sorted(STARTUP)])
def test_every_hook_reaches_every_child(hook):
    connector = ours()
    if isinstance(public_hooks()[hook], property):
        reached = []
        for fake in connector.sub_connectors:
            cls = type(fake)
            fake.__class__ = type(
                "Spy", (cls,), {hook: property(lambda self: reached.append(self) or hook.startswith("supports"))}
            )
        use(connector, hook)
        assert reached == connector.sub_connectors
        return
    use(connector, hook)
    reached = [bool(fake.called(CHILDS_NAME.get(hook, hook))) for fake in connector.sub_connectors]
    assert reached == ([True, False] if hook in CHOSEN_ONLY else [True, True])


@pytest.mark.parametrize("hook", RUNTIME)
@pytest.mark.parametrize("error", FAULTS)
@pytest.mark.parametrize("faulty", [0, 1])
def test_a_childs_exception_is_counted_and_isolates_it_and_stops_neither_engine_nor_sibling(hook, error, faulty):
    connector = ours()
    bad, good = connector.sub_connectors[faulty], connector.sub_connectors[1 - faulty]
    name = CHILDS_NAME.get(hook, hook)
    bad.raising, bad.error = {name}, error
    answer = use(connector, hook)
    is_asked = [True, False] if hook in CHOSEN_ONLY else [True, True]
    if not isinstance(public_hooks()[hook], property):
        assert bool(good.called(name)) == is_asked[1 - faulty]
    counted = connector.get_kv_connector_stats() if hook != "get_kv_connector_stats" else answer
    tallies = counted.tallies if counted is not None else {}
    errors = [by_label(tallies[name], "errors") if name in tallies else {} for name in "ab"]
    assert errors[1 - faulty] == {}
    assert errors[faulty] == ({name: 1} if is_asked[faulty] else {})
    assert [one.isolated for one in connector._children] == [is_asked[faulty] and index == faulty for index in (0, 1)]
    use(connector, hook)  # and again, now that it has been seen


@pytest.mark.parametrize("hook", RUNTIME)
def test_a_childs_garbage_is_answered_like_an_exception_or_harmless(hook):
    connector = ours()
    garbage = object()
    for fake in connector.sub_connectors[:1]:
        fake.answers[CHILDS_NAME.get(hook, hook)] = lambda *args: garbage
    use(connector, hook)
    connector.build_connector_meta(scheduler_output())
    connector.get_transfer_results(set())


@pytest.mark.parametrize("hook", [*RUNTIME, *sorted(STARTUP)])
@pytest.mark.parametrize("error", ENDINGS)
def test_a_shutdown_of_the_process_passes_and_is_no_fault_of_the_child(hook, error):
    connector = ours()
    bad = connector.sub_connectors[0]
    bad.raising, bad.error = {CHILDS_NAME.get(hook, hook)}, error
    with pytest.raises(error):
        use(connector, hook)
    assert not connector._children[0].isolated
    assert not by_label(connector._children[0].tally, "errors")


@pytest.mark.parametrize("hook", sorted(STARTUP))
@pytest.mark.parametrize("error", FAULTS)
def test_a_childs_exception_at_start_is_a_refusal_that_names_child_and_hook(hook, error):
    connector = ours()
    connector.sub_connectors[1].raising, connector.sub_connectors[1].error = {hook}, error
    with pytest.raises(RuntimeError, match=f"connector 'b' of the MultiConnector failed in {hook}: ") as caught:
        use(connector, hook)
    assert isinstance(caught.value.__cause__, error)


@pytest.mark.parametrize("hook", ["get_required_kvcache_layout", "requires_piecewise_for_cudagraph"])
@pytest.mark.parametrize("error", FAULTS)
def test_a_childs_exception_in_a_hook_of_its_class_is_a_refusal_that_names_child_and_hook(hook, error, monkeypatch):
    def raises(cls, argument):
        raise error

    monkeypatch.setattr(FakeChild, hook, classmethod(raises))
    config = vllm_config(child("a", "PlainChild"), child("b"))
    extra_config = config.kv_transfer_config.kv_connector_extra_config
    with pytest.raises(RuntimeError, match=f"connector 'b' of the MultiConnector failed in {hook}: "):
        getattr(MultiConnector, hook)(config if hook == "get_required_kvcache_layout" else extra_config)


def test_a_child_with_a_hook_that_cannot_even_be_looked_at_is_called_as_the_interface_says():
    class Unreadable:
        @property
        def handle_preemptions(self):
            raise Boom

    assert not Child(0, "a", Unreadable(), Unreadable).wants_preempted_ids


def test_bound_metadata_shows_on_the_multi_connector_itself():
    connector = worker()
    assert not connector.has_connector_metadata()
    connector.bind_connector_metadata(METADATA)
    assert connector.has_connector_metadata()
    connector.clear_connector_metadata()
    assert not connector.has_connector_metadata()
    assert connector.role == KVConnectorRole.WORKER


def test_keyword_arguments_of_layer_hooks_are_passed_on():
    connector = worker()
    seen = []
    for fake in connector.sub_connectors:
        fake.start_load_kv = lambda *args, **kwargs: seen.append((args, kwargs))
        fake.save_kv_layer = lambda *args, **kwargs: seen.append((args, kwargs))
    connector.start_load_kv("context", extra=1)
    connector.save_kv_layer("layer", None, None, extra=2)
    assert seen == [(("context",), {"extra": 1})] * 2 + [(("layer", None, None), {"extra": 2})] * 2


ANY = ["has_pending_block_frees", "has_pending_push_work", "requires_kv_delivery", "register_finished_partial_tail"]


@pytest.mark.parametrize("hook", [*ANY, "supports_divergent_local_hybrid_hits", "reset_cache"])
@pytest.mark.parametrize("answers", [(False, False), (False, True), (True, False), (True, True)])
def test_yes_or_no_is_merged_by_the_stated_rule(hook, answers):
    connector = ours()
    for fake, answer in zip(connector.sub_connectors, answers, strict=True):
        fake.answers[hook] = answer
    assert use(connector, hook) == (any(answers) if hook in ANY else all(answers))


def test_a_child_that_raises_in_reset_fails_it_and_one_that_has_nothing_to_reset_does_not():
    connector = multi()
    assert connector.reset_cache() is True  # both answer None
    connector.sub_connectors[0].raising = {"reset_cache"}
    assert connector.reset_cache() is False


def test_the_memory_pool_is_that_of_the_one_child_that_has_one():
    connector, pool = worker(), contextlib.nullcontext()
    assert connector.get_mem_pool_context() is None
    connector.sub_connectors[1].answers["get_mem_pool_context"] = pool
    assert connector.get_mem_pool_context() is pool
    connector.sub_connectors[0].answers["get_mem_pool_context"] = pool
    with pytest.raises(ValueError, match=r"Multiple connectors provide a KV cache memory pool \(a, b\)"):
        connector.get_mem_pool_context()


def finished_count_of(*counts):
    connector = multi()
    for fake, count in zip(connector.sub_connectors, counts, strict=True):
        fake.answers["get_finished_count"] = count
    return connector.get_finished_count()


def test_finished_counts_must_agree():
    found = [finished_count_of(*counts) for counts in ((None, None), (2, None), (2, 2))]
    assert found == [None, None, 2]
    with pytest.raises(ValueError, match=r"different numbers of completion reports: a \(1\), b \(2\)"):
        finished_count_of(1, 2)


def test_layouts_must_agree():
    assert [layout_of(*both) for both in (("", ""), ("NHD", ""), ("HND", "HND"))] == [None, "NHD", "HND"]
    with pytest.raises(ValueError, match=r"different KV cache layouts: a \(NHD\), b \(HND\)"):
        layout_of("NHD", "HND")


def layout_of(first, second):
    return MultiConnector.get_required_kvcache_layout(
        vllm_config(child("a", layout=first or None), child("b", layout=second or None))
    )


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_piecewise_graphs_if_any_child_needs_them(first, second):
    extra = {"connectors": [child("a", piecewise=first), child("b", piecewise=second)]}
    assert MultiConnector.requires_piecewise_for_cudagraph(extra) == (first or second)


@pytest.mark.parametrize("cls, supported", [("FakeChild", True), ("PlainChild", False)])
def test_hybrid_support_is_what_every_child_has(cls, supported):
    config = vllm_config(child("a"), child("b", cls)).kv_transfer_config
    assert MultiConnector.all_children_support_hma(config) == supported
