# SPDX-License-Identifier: Apache-2.0
"""vLLM's NIXL connector as a decode worker: vLLM's scheduler, its lookup, its pairing of blocks; nothing is sent."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from devtools.scheduler_lab import LabSettings, fill, make_request, make_scheduler

pytestmark = pytest.mark.patches

BLOCK = 64
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "engine_id": "decoder"}
PREFILLER = {"remote_engine_id": "prefiller", "remote_request_id": "r", "remote_host": "localhost", "remote_port": 1}


def forget_states(scheduler: Scheduler) -> None:
    pool = scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash and get_group_id(block.block_hash)})


def pair(local: Any, remote: Any) -> Any:
    """NIXL's own pairing of the blocks of both sides, as its worker does it."""
    worker: Any = SimpleNamespace(_has_mamba=True, _group_spec_types=(FullAttentionSpec, MambaSpec))
    if not local:  # nothing to read: the prefiller is only told that it may free its blocks
        return (), ()
    return NixlBaseConnectorWorker._apply_prefix_caching(worker, local, remote, 1, 1)


@pytest.mark.parametrize("num_blocks", range(1, 6))
@pytest.mark.parametrize("tail", [1, 2, BLOCK])
def test_a_decoder_that_has_lost_its_states_pairs_its_blocks_with_the_prefillers(num_blocks: int, tail: int) -> None:
    config = KVTransferConfig(**NIXL)
    settings = LabSettings(block_size=BLOCK, match_unit=16, num_blocks=400, kv_transfer_config=config)
    scheduler = make_scheduler(settings)
    tokens = list(range(num_blocks * BLOCK + tail))
    fill(scheduler, "before", tokens, settings)
    forget_states(scheduler)
    remote = [list(range(100, 101 + (len(tokens) - 2) // BLOCK)), [200]]  # of all tokens but the last
    parameters = {**PREFILLER, "do_remote_prefill": True, "remote_block_ids": remote}
    scheduler.add_request(make_request("now", tokens, 4, settings, kv_transfer_params=parameters))

    metadata: Any = scheduler.schedule().kv_connector_metadata

    mine, theirs = pair(metadata.reqs_to_recv["now"].local_block_ids, remote)
    assert [len(group) for group in mine] == [len(group) for group in theirs]
