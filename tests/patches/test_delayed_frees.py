# SPDX-License-Identifier: Apache-2.0
"""A finished request for which a load and another transfer are under way: vLLM's own scheduler, patch 0003."""

from collections.abc import Iterator

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from devtools.scheduler_lab import LabSettings, make_request, make_scheduler
from tests.patches.lab import LabConnector, config

pytestmark = pytest.mark.patches

BLOCK, NUM_BLOCKS = 64, 400
LOADED, SENT = KVConnectorOutput(finished_recving={"one"}), KVConnectorOutput(finished_sending={"one"})


@pytest.fixture(autouse=True)
def lab_connector() -> Iterator[None]:
    LabConnector.answer, LabConnector.delay_free = lambda *_: (2 * BLOCK, True), True
    yield
    LabConnector.answer, LabConnector.delay_free = None, False


@pytest.mark.parametrize("first, last", [(LOADED, SENT), (SENT, LOADED)], ids=["load-first", "load-last"])
def test_blocks_are_freed_at_the_last_of_two_reports(first: KVConnectorOutput, last: KVConnectorOutput) -> None:
    transfer = KVTransferConfig(**config())
    settings = LabSettings(block_size=BLOCK, match_unit=16, num_blocks=NUM_BLOCKS, kv_transfer_config=transfer)
    scheduler = make_scheduler(settings)
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    scheduler.add_request(make_request("one", [0] * (3 * BLOCK), 4, settings))
    scheduler.schedule()
    scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)  # while it loads; the connector also sends
    held = free()
    assert held < NUM_BLOCKS - 1
    for _ in range(2):  # the second time nothing waits for it
        scheduler._update_from_kv_xfer_finished(first)
        assert free() == held and "one" in scheduler.requests
    scheduler._update_from_kv_xfer_finished(last)
    assert free() == NUM_BLOCKS - 1 and not scheduler.requests
    assert sum(scheduler.kv_connector_faults.values()) == 1
