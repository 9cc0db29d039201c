# SPDX-License-Identifier: Apache-2.0
"""vLLM's MoRIIO, NIXL and HiSparse connectors as children, on a machine without their network libraries and a GPU.

Their constructors open connections, so they are not run. An object gets just the state that the tested methods read.
The methods are vLLM's own.
"""

import queue
import sys
import threading
from collections import defaultdict
from types import ModuleType, SimpleNamespace
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

try:
    import msgpack  # noqa: F401
except ImportError:
    sys.modules["msgpack"] = ModuleType("msgpack")  # MoRIIO's wire format, which nothing here reaches

from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_connector as moriio
from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_common import ROLE, MoRIIOMode, set_role

MODULE = __name__


def bare(cls: type[Any], **state: Any) -> Any:
    """An object of ``cls`` with this state and no constructor run."""
    made = object.__new__(cls)
    for name, value in state.items():
        setattr(made, name, value)
    return made


class MoRIIOProducer(moriio.MoRIIOConnector):
    """The side that prefills: it holds blocks until the decoding side has acknowledged that it has them."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        set_role(ROLE.PRODUCER)
        self.mode = MoRIIOMode.READ
        self._transfers_mamba_state = False
        self.connector_scheduler = self.connector_worker = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = _moriio_scheduler()
        else:
            self.connector_worker = _moriio_worker()

    def acknowledge(self, transfer_id: str) -> None:
        """The decoding side has the blocks of a transfer; in a worker."""
        self.connector_worker.moriio_wrapper.done_req_ids.append(transfer_id)


def _moriio_scheduler() -> Any:
    tables = (
        *("_reqs_need_recv", "_reqs_need_save", "_req_kv_params", "_reqs_need_pending_save", "_reqs_need_send"),
        *("_deferred_send_deadlines", "_pending_sent_acks", "transfer_id_to_request_id", "request_id_to_transfer_id"),
    )
    return bare(
        moriio.MoRIIOConnectorScheduler,
        **{table: {} for table in tables},
        is_producer=True,
        mode=MoRIIOMode.READ,
        paths={},
        kv_cache_config=SimpleNamespace(kv_cache_groups=["the only one"], select_transfer_block_ids=list),
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_size_local=1, tensor_parallel_size=1)
        ),
        blocks_per_sw=[0],
        engine_id="engine",
        host_ip="localhost",
        handshake_port=1,
        side_notify_port=2,
        _defer_timeout=600.0,
        _global_dp_rank=0,
        _has_mamba=False,
        _is_hma_required=False,
    )


class _Wrapper:
    """In place of MoRIIO's network engine."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.done_req_ids: list[str] = []

    def async_wait_reqid(self) -> None:
        """The listener for acknowledgements runs."""

    def pop_finished_req_ids(self) -> list[str]:
        with self.lock:
            done, self.done_req_ids = self.done_req_ids, []
        return done


def _moriio_worker() -> Any:
    return bare(
        moriio.MoRIIOConnectorWorker,
        is_producer=True,
        mode=MoRIIOMode.READ,
        world_size=1,
        moriio_wrapper=_Wrapper(),
        transfer_id_to_request_id={},
        _pending_unmapped_acks=[],
        _consumer_notification_counts={},
        _completed_consumer_notifications=set(),
        _invalid_block_ids=set(),
        shutdown=lambda: None,
    )


class NixlProducer(NixlBaseConnector):
    """The side that prefills. Its scheduler's half is not run: the test says what it answers and sends."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.kv_transfer_config = vllm_config.kv_transfer_config
        self.connector_scheduler = MagicMock()
        self.connector_scheduler.get_num_new_matched_tokens.return_value = (0, False)
        self.connector_scheduler.build_connector_meta.side_effect = lambda output: KVConnectorMetadata()
        self.connector_worker = None if role == KVConnectorRole.SCHEDULER else _nixl_worker()

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


class Coordinator:
    """In place of HiSparse's, which needs a cache manager with a host pool: it records what it is told."""

    def __init__(self) -> None:
        self.imports: list[tuple[str, bool]] = []
        self.host_group_id = 0

    def finish_host_import(self, request_id: str, *, failed: bool) -> None:
        self.imports.append((request_id, failed))

    def advance_scheduled(self, ranges: Any) -> None:
        list(ranges)

    def build_offload_command(self) -> None:
        return None

    def take_host_block_copies(self) -> tuple[()]:
        return ()

    def all_context_pages_resident(self, scheduled: Any) -> bool:
        return True

    def take_residency_updates(self, scheduled: Any) -> dict[str, Any]:
        return {}

    def build_row_mirrors(self, rows: Any) -> tuple[()]:
        return ()

    def has_pending_work(self) -> bool:
        return False

    def has_pending_reclamation(self) -> bool:
        return False


class HiSparse(HiSparseConnector):
    """The scheduler's half; in a worker it does nothing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.connector_worker = None
        self.connector_scheduler = HiSparseConnectorScheduler(async_speculative=False)
        self.connector_scheduler.bind_coordinator(Coordinator())  # type: ignore[arg-type]

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
