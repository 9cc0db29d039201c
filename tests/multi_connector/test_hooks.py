# SPDX-License-Identifier: Apache-2.0
"""Hooks that do nothing are not called: an engine steps a hundred times a second, and has some for each layer."""

import inspect

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from tests.multi_connector.fakes import child, multi
from vllm_overlay.connector.connector import HybridOffloadConnector
from vllm_overlay.multi_connector import hooks
from vllm_overlay.multi_connector.hooks import empty_hooks
from vllm_overlay.named_child import empty_hook


class Inheriting:
    """No connector, but with some of its methods."""

    take_events = KVConnectorBase_V1.take_events
    on_new_request = KVConnectorBase_V1.on_new_request

    def update_connector_output(self, output: object) -> None:
        """Does nothing, and does not say so."""

    @empty_hook
    def save_kv_layer(self, *args: object) -> None:
        """Does nothing."""


class Overriding(Inheriting):
    def take_events(self) -> tuple[str, ...]:
        return ("an event",)

    def save_kv_layer(self, *args: object) -> None:
        """Saves."""


@pytest.mark.parametrize("name", sorted(hooks._MAY_BE_EMPTY))
def test_what_may_be_empty_does_nothing_in_vllms_interface(name: str) -> None:
    """Or is left to the connector. In both cases a call answers what the MultiConnector takes instead."""
    method = vars(KVConnectorBase_V1)[name]
    arguments = [None for _ in inspect.signature(method).parameters.values() if _.kind is not _.VAR_KEYWORD]
    assert not method(*arguments)


def test_a_hook_is_empty_if_it_is_inherited_or_marked_and_neither_overridden_nor_given_to_the_instance() -> None:
    assert empty_hooks(Inheriting()) == {"take_events", "on_new_request", "save_kv_layer"}
    assert empty_hooks(Overriding()) == {"on_new_request"}
    made = Inheriting()
    made.take_events = lambda: ()  # type: ignore[method-assign]
    assert "take_events" not in empty_hooks(made)


def test_hooks_of_a_connector_that_finds_its_attributes_its_own_way_are_all_called() -> None:
    """vLLM's own tests of its MultiConnector do so."""

    class Recording(Inheriting):
        def __getattribute__(self, name: str) -> object:
            return object.__getattribute__(self, name)

    assert empty_hooks(object.__new__(Recording)) == frozenset()


def test_a_tier_has_no_work_for_single_layers() -> None:
    found = empty_hooks(object.__new__(HybridOffloadConnector))
    assert {"wait_for_layer_load", "save_kv_layer", "take_events", "handle_preemptions"} <= found
    assert found.isdisjoint({"build_connector_worker_meta", "update_connector_output", "get_kv_connector_stats"})


def test_an_empty_hook_is_not_called() -> None:
    connector = multi(child("a"), child("b"))
    first, second = connector._children
    first.empty_hooks = frozenset({"wait_for_layer_load"})
    connector.wait_for_layer_load("layer")
    assert first.hook_seconds.keys() == set()
    assert second.hook_seconds.keys() == {"wait_for_layer_load"}
