# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that runs vLLM's own tests of its MultiConnector against ours; see ``test_upstream.py``.

The names of vLLM's module become our classes. vLLM's tests also set and read private attributes; here those become
views of where our class keeps the same. Nothing of what our class does is changed.
"""

import os
from collections.abc import Iterator, MutableMapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as shipped
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from vllm_overlay.multi_connector import MultiConnector
from vllm_overlay.multi_connector.child import Child
from vllm_overlay.multi_connector.lookup import Lookup
from vllm_overlay.multi_connector.metadata import MultiMetadata, MultiWorkerMetadata
from vllm_overlay.multi_connector.prom_metrics import MultiPromMetrics
from vllm_overlay.multi_connector.scheduler import SchedulerSide
from vllm_overlay.multi_connector.settings import ChildSettings, MultiSettings
from vllm_overlay.multi_connector.stats import MultiStats
from vllm_overlay.multi_connector.weights import LoadWeight


class _Chosen(MutableMapping[str, int]):
    """``_requests_to_connector``: request -> child, in our table of lookups."""

    def __init__(self, lookups: dict[str, Lookup]) -> None:
        self._lookups = lookups

    def __getitem__(self, request_id: str) -> int:
        chosen = self._lookups[request_id].chosen
        if chosen is None:
            raise KeyError(request_id)
        return chosen

    def __setitem__(self, request_id: str, chosen: int) -> None:
        self._lookups[request_id] = Lookup([], chosen, 0)

    def __delitem__(self, request_id: str) -> None:
        del self._lookups[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lookups)

    def __len__(self) -> int:
        return len(self._lookups)


def _set_connectors(self: MultiConnector, connectors: list[Any]) -> None:
    self._children = [Child(i, str(i), connector, lambda: None) for i, connector in enumerate(connectors)]
    specs = [
        SimpleNamespace(name=child.name, settings=ChildSettings(), load_weight=LoadWeight(1.0))
        for child in self._children
    ]
    self._scheduler = SchedulerSide(self._children, MultiSettings(connectors=[{}]), specs, has_recurrent_groups=False)


def _extra_saves(held: dict[str, set[int]]) -> dict[str, int]:
    """``_extra_async_saves``: request -> how many more reports than one are due, from our table of holders."""
    return {request_id: len(children) - 1 for request_id, children in held.items() if len(children) > 1}


def _substitute() -> None:
    MultiConnector._connectors = property(lambda self: self.sub_connectors, _set_connectors)
    MultiConnector._all_support_hma = property(
        lambda self: all(isinstance(connector, SupportsHMA) for connector in self.sub_connectors)
    )
    MultiConnector._requests_to_connector = property(lambda self: _Chosen(self._scheduler.lookups.by_request))
    MultiConnector._extra_async_saves = property(lambda self: _extra_saves(self._scheduler._outstanding._held))
    MultiWorkerMetadata.metadata = property(lambda self: self.children)
    MultiMetadata.metadata = property(lambda self: self.children)
    MultiPromMetrics._prom_metrics = property(
        lambda self: self._children, lambda self, metrics: setattr(self, "_children", metrics)
    )
    shipped.MultiConnector = MultiConnector
    shipped.MultiKVConnectorMetadata = MultiMetadata
    shipped.MultiKVConnectorStats = MultiStats
    shipped.MultiKVConnectorPromMetrics = MultiPromMetrics
    shipped.MultiKVConnectorWorkerMetadata = MultiWorkerMetadata


if os.environ["UPSTREAM_MULTI_CONNECTOR"] == "ours":
    _substitute()


def _mock(*args: Any, **kwargs: Any) -> MagicMock:
    """A mocked request gets the two numbers that every request of vLLM's has and that our class reads."""
    mock = MagicMock(*args, **kwargs)
    if "request_id" in kwargs:
        mock.num_tokens, mock.shared_prefix_boundary = 1000, 0
    return mock


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Models of vLLM's tests are on the Hugging Face hub; ours are made on the spot."""
    from tests.v1.kv_connector.unit import utils

    model = os.environ["UPSTREAM_MODEL"]
    utils.create_vllm_config.__defaults__ = (model, *utils.create_vllm_config.__defaults__[1:])
    for module in {item.module for item in items}:
        if hasattr(module, "MagicMock"):
            module.MagicMock = _mock
        module.MODEL_NAME = model
