# SPDX-License-Identifier: Apache-2.0
import pytest
from vllm.distributed.kv_events import AllBlocksCleared
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tests.multi_connector.fakes import FakeWorkerMetadata, multi
from vllm_overlay.multi_connector import validation

METADATA, WORKER_METADATA, EVENT = KVConnectorMetadata(), FakeWorkerMetadata({"x"}), AllBlocksCleared()


@pytest.mark.parametrize(
    ("parse", "answer", "found"),
    [
        (validation.optional(KVConnectorMetadata), METADATA, METADATA),
        (validation.optional(KVConnectorMetadata), None, None),
        (validation.worker_metadata, WORKER_METADATA, WORKER_METADATA),
        (validation.worker_metadata, None, None),
        (validation.truth, True, True),
        (validation.truth, False, False),
        (validation.lookup, (None, False), (None, False)),
        (validation.lookup, [5, 1], (5, True)),
        (validation.integers, [1, 2], (1, 2)),
        (validation.block_ids, None, set()),
        (validation.block_ids, [2, 2], {2}),
        (validation.hit_sources, {CacheHitSource.DISK: 5}, {CacheHitSource.DISK: 5}),
        (validation.finished, (True, None), (True, None)),
        (validation.finished, (False, {"x": 1}), (False, {"x": 1})),
        (validation.events, None, []),
        (validation.events, iter([EVENT]), [EVENT]),
        (
            validation.transfer_results,
            KVConnectorTransferResults({"a"}, {"b"}, {"c"}),
            KVConnectorTransferResults({"a"}, {"b"}, {"c"}),
        ),
    ],
)
def test_an_answer_that_can_be_one_passes(parse, answer, found):
    assert parse(answer) == found


@pytest.mark.parametrize(
    ("parse", "answer"),
    [
        (validation.optional(KVConnectorMetadata), object()),
        (validation.worker_metadata, object()),
        (validation.truth, 1),
        (validation.truth, "yes"),
        (validation.truth, None),
        (validation.lookup, 5),
        (validation.integers, ["1"]),
        (validation.integers, None),
        (validation.block_ids, [object()]),
        (validation.hit_sources, {"disk": 5}),
        (validation.hit_sources, {CacheHitSource.DISK: "5"}),
        (validation.hit_sources, None),
        (validation.finished, (1, None)),
        (validation.finished, (True, {1: 2})),
        (validation.finished, None),
        (validation.events, ["x"]),
        (validation.events, 5),
        (validation.transfer_results, KVConnectorTransferResults({1}, set(), set())),
        (validation.transfer_results, KVConnectorTransferResults(5, set(), set())),
        (validation.transfer_results, None),
    ],
)
def test_an_answer_that_can_be_none_raises(parse, answer):
    with pytest.raises((TypeError, ValueError, AttributeError)):
        parse(answer)


def test_what_only_happens_to_be_truthy_does_not_keep_requests_waiting_for_blocks():
    connector = multi()
    connector.sub_connectors[0].answers["has_pending_block_frees"] = object()
    assert not connector.has_pending_block_frees()
    assert connector._children[0].isolated
