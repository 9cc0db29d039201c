# SPDX-License-Identifier: Apache-2.0
"""vLLM's NIXL and HiSparse connectors as children, on a machine without their network libraries and a GPU.

Their constructors open connections, so they are not run. An object gets just the state that the tested methods read.
The methods are vLLM's own.
"""

import queue
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
    HiSparseConnector,
    HiSparseConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.request import RequestStatus

MODULE = __name__


def bare(cls: type[Any], **state: Any) -> Any:
    """An object of ``cls`` with this state and no constructor run."""
    made = object.__new__(cls)
    for name, value in state.items():
        setattr(made, name, value)
    return made


class NixlProducer(NixlBaseConnector):
    """The side that prefills. Its scheduler's half is not run: the test says what it answers and sends."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.kv_transfer_config = vllm_config.kv_transfer_config
        self.connector_scheduler = MagicMock()
        self.connector_scheduler.get_num_new_matched_tokens.return_value = (0, False)
        self.connector_scheduler.build_connector_meta.side_effect = lambda output: KVConnectorMetadata()
        self.connector_worker = None if role == KVConnectorRole.SCHEDULER else _nixl_worker()

    def register_kv_caches(self, kv_caches: Any) -> None:
        """No network."""

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        """No network."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The producer loads nothing."""

    def wait_for_save(self) -> None:
        """Blocks are read by the other side."""

    def get_kv_connector_stats(self) -> None:
        return None


def _nixl_worker() -> Any:
    return bare(
        NixlPullConnectorWorker,
        transfer_topo=object(),
        tp_rank=0,
        pcp_rank=0,
        pcp_dcp_sharded=False,
        use_host_buffer=False,
        enable_permute_local_kv=False,
        enable_heterogeneous_attn_post_process=False,
        _has_mamba=False,
        _is_hma_required=False,
        _physical_blocks_per_logical_kv_block=1,
        nixl_wrapper=SimpleNamespace(get_new_notifs=dict),
        xfer_stats=MagicMock(),
        consumer_notification_counts_by_req=defaultdict(int),
        expected_consumer_notifications_by_req={},
        _recving_transfers={},
        _recving_metadata={},
        _recv_failures=set(),
        _replicated_pcp_done_sending=set(),
        _failed_recv_reqs=queue.Queue(),
        _invalid_block_ids=queue.Queue(),
        _reqs_to_process=set(),
        _reqs_to_send={},
        _cleanup_remote_engines=lambda: None,
        shutdown=lambda: None,
    )


def coordinator() -> MagicMock:
    """In place of HiSparse's, which needs a cache manager with a host pool. It has nothing to do."""
    nothing = {
        "build_offload_command": None,
        "take_host_block_copies": (),
        "all_context_pages_resident": True,
        "take_residency_updates": {},
        "build_row_mirrors": (),
        "has_pending_work": False,
        "has_pending_reclamation": False,
    }
    return MagicMock(host_group_id=0, **{f"{method}.return_value": answer for method, answer in nothing.items()})


class HiSparse(HiSparseConnector):
    """The scheduler's half; in a worker it does nothing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.connector_worker = None
        self.connector_scheduler = HiSparseConnectorScheduler(async_speculative=False)
        self.connector_scheduler.bind_coordinator(coordinator())

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """It has its coordinator."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        """No GPU."""

    @property
    def coordinator(self) -> Any:
        assert self.connector_scheduler is not None
        return self.connector_scheduler.coordinator

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """No GPU."""

    def finish_forward(self) -> None:
        """No GPU."""

    def build_connector_worker_meta(self) -> None:
        return None

    def get_kv_connector_stats(self) -> None:
        return None


def to_be_decoded_elsewhere(request_id: str) -> Any:
    """A finished request that another engine is to decode."""
    return SimpleNamespace(
        request_id=request_id,
        num_tokens=1000,
        num_prompt_tokens=1000,
        num_computed_tokens=1000,
        shared_prefix_boundary=0,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
        kv_transfer_params={"do_remote_decode": True, "transfer_id": f"transfer of {request_id}"},
    )
