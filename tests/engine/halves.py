# SPDX-License-Identifier: Apache-2.0
"""The parts of the offload connectors in a running engine. Only here do engine tests reach into the connector.

``driver.engine_core`` runs the scheduler's halves and, in the same process, one rank's worker halves.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from vllm_overlay.connector.connector import HybridOffloadConnector

if TYPE_CHECKING:
    from tests.engine.driver import Driver


def _offload_connectors(connector: Any) -> list[HybridOffloadConnector]:
    if isinstance(connector, HybridOffloadConnector):
        return [connector]
    return [found for child in getattr(connector, "sub_connectors", []) for found in _offload_connectors(child)]


def _connector_of(connector: Any, tier: str) -> Any:
    return next(found for found in _offload_connectors(connector) if found.settings.tier == tier)


def scheduler_half(driver: "Driver", tier: str) -> Any:
    return _connector_of(driver.engine_core.scheduler.connector, tier)._scheduler


def worker_half(tier: str) -> Any:
    return _connector_of(get_kv_transfer_group(), tier)._worker


def tier_managers(driver: "Driver") -> list[Any]:
    """Every tier's index half."""
    found = _offload_connectors(driver.engine_core.scheduler.connector)
    return [connector._scheduler._tier for connector in found if connector._scheduler is not None]


def tier_manager(driver: "Driver", tier: str) -> Any:
    return scheduler_half(driver, tier)._tier


def tier_worker(tier: str) -> Any:
    """The tier's byte half."""
    return worker_half(tier)._tier


def transfer_of(tier: str) -> Any:
    """What copies between the KV cache and that tier's host memory."""
    return worker_half(tier)._transfer
