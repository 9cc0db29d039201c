# SPDX-License-Identifier: Apache-2.0
import pytest
from vllm.distributed.kv_events import AllBlocksCleared
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tests.multi_connector.fakes import FakeWorkerMetadata, multi
from vllm_overlay.multi_connector import answers

METADATA, WORKER_METADATA, EVENT = KVConnectorMetadata(), FakeWorkerMetadata({"x"}), AllBlocksCleared()


@pytest.mark.parametrize(
    ("parse", "answer", "found"),
    [
        (answers.optional(KVConnectorMetadata), METADATA, METADATA),
        (answers.optional(KVConnectorMetadata), None, None),
        (answers.worker_metadata, WORKER_METADATA, WORKER_METADATA),
        (answers.worker_metadata, None, None),
        (answers.truth, True, True),
        (answers.truth, False, False),
        (answers.lookup, (None, False), (None, False)),
        (answers.lookup, [5, 1], (5, True)),
        (answers.integers, [1, 2], (1, 2)),
        (answers.block_ids, None, set()),
        (answers.block_ids, [2, 2], {2}),
        (answers.hit_sources, {CacheHitSource.DISK: 5}, {CacheHitSource.DISK: 5}),
        (answers.finished, (True, None), (True, None)),
        (answers.finished, (False, {"x": 1}), (False, {"x": 1})),
        (answers.events, None, []),
        (answers.events, iter([EVENT]), [EVENT]),
        (
            answers.transfer_results,
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
        (answers.optional(KVConnectorMetadata), object()),
        (answers.worker_metadata, object()),
        (answers.truth, 1),
        (answers.truth, "yes"),
        (answers.truth, None),
        (answers.lookup, 5),
        (answers.integers, ["1"]),
        (answers.integers, None),
        (answers.block_ids, [object()]),
        (answers.hit_sources, {"disk": 5}),
        (answers.hit_sources, {CacheHitSource.DISK: "5"}),
        (answers.hit_sources, None),
        (answers.finished, (1, None)),
        (answers.finished, (True, {1: 2})),
        (answers.finished, None),
        (answers.events, ["x"]),
        (answers.events, 5),
        (answers.transfer_results, KVConnectorTransferResults({1}, set(), set())),
        (answers.transfer_results, KVConnectorTransferResults(5, set(), set())),
        (answers.transfer_results, None),
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
