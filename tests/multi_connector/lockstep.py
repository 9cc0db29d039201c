# SPDX-License-Identifier: Apache-2.0
"""MultiConnectors over fakes, one a process, joined step by step as vLLM joins them."""

import itertools
import pickle
from collections import defaultdict

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.multi_connector import tables
from tests.multi_connector.fakes import (
    BLOCK,
    FakeBase,
    blocks,
    cache_manager,
    child,
    multi,
    request,
    scheduler_output,
    worker,
)
from vllm_overlay.multi_connector.lifecycle import Phase
from vllm_overlay.tally import ReportTimes, Tally


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def answering(*answers, weights=None, children=(), **settings):
    """A MultiConnector whose children a, b, c... offer these tokens, asynchronously. Their weights are 1."""
    named = zip("abcdefgh", weights or [1.0] * len(answers), answers, strict=False)
    connector = multi(*(children or [child(name, weight=weight) for name, weight, _ in named]), **settings)
    connector._scheduler._clock = Clock()
    for fake, answer in zip(connector.sub_connectors, answers, strict=True):
        answers_it(fake, answer)
    return connector


def answers_it(fake, answer):
    """What the child says to every lookup from now on."""
    fake.answers["get_num_new_matched_tokens"] = answer if isinstance(answer, tuple) else (answer, True)


def admit(connector, name="r", tokens=None, ids=(1,)):
    """Looks a request up and allocates what was found, or ``tokens``, in blocks ``ids``. Returns what is loaded."""
    found, _ = connector.get_num_new_matched_tokens(request(name), 0)
    tokens = found if tokens is None else tokens
    connector.update_state_after_alloc(request(name), blocks(*ids), tokens)
    return tokens


def reported(connector, name="r", failed=()):
    """The workers report the request's load."""
    connector.update_connector_output(KVConnectorOutput(finished_recving={name}, failed_recving=set(failed)))


def allocated(fake):
    """The numbers of tokens a child was told to load."""
    return [tokens for (_, _, tokens) in fake.called("update_state_after_alloc")]


def tally_of(connector, name="a"):
    return connector._children["abcdefgh".index(name)].tally


def by_label(tally, metric):
    """One counter of a tally: label -> amount."""
    return {key.partition(":")[2]: amount for key, amount in tally.counters.items() if key.startswith(f"{metric}:")}


def rebuilt(connector, make):
    """From now on new instances of its first child go through ``make``."""
    child = connector._children[0]
    build = child._build

    def building():
        make(fake := build())
        return fake

    child._build = building


class Lockstep:
    """A scheduler-side and one or more worker-side MultiConnectors, joined as vLLM joins them.

    The test moves their clock. ``tallies``: what all processes report of each child, added up as vLLM's front end does.
    """

    def __init__(self, *children, ranks=1, groups=(BLOCK,), **settings):
        """``groups``: the block size of each KV cache group."""
        found = children or (child("a"), child("b"))
        self.scheduler = multi(*found, **settings)
        self.workers = [worker(*found, **settings) for _ in range(ranks)]
        self.aggregator = KVOutputAggregator.from_connector(self.scheduler, ranks)
        self.reported = {}
        self.tallies = defaultdict(Tally)
        self.clock = self.scheduler._scheduler._clock = Clock()
        for connector in (self.scheduler, *self.workers):
            connector._report_times = ReportTimes(clock=itertools.count(1).__next__)  # a report in every step
        self.scheduler.bind_kv_cache_manager(cache_manager(*groups))
        for rank, connector in enumerate(self.workers):
            connector._worker._clock = self.clock
            connector.register_kv_caches({"layer": rank})
            connector.set_host_xfer_buffer_ops("copy")

    def told(self, metric, name="a"):
        """What has been counted, over all labels."""
        return self.tallies[name].total(metric)

    def fakes(self, index):
        return [connector.sub_connectors[index] for connector in (self.scheduler, *self.workers)]

    def admit(self, request_id, child_index, tokens=64, asynchronous=True):
        r = self.offer(request_id, child_index, tokens, asynchronous)
        self.scheduler.update_state_after_alloc(r, blocks(4, 5), tokens)

    def offer(self, request_id, child_index, tokens=64, asynchronous=True, num_local=0):
        """A lookup that ``child_index`` wins; returns the request."""
        for index, fake in enumerate(self.scheduler.sub_connectors):
            if isinstance(fake, FakeBase):
                answers_it(fake, (tokens if index == child_index else 0, asynchronous))
        r = request(request_id)
        assert self.scheduler.get_num_new_matched_tokens(r, num_local)[0] == tokens
        return r

    def finish(self, request_id, *holders):
        for index, fake in enumerate(self.scheduler.sub_connectors):
            fake.answers["request_finished_all_groups"] = (index in holders, None)
        return self.scheduler.request_finished_all_groups(request(request_id), ([1],))[0]

    def report(self, child_index, rank=0, sending=(), recving=(), failed=()):
        self.reported[rank, child_index] = KVConnectorTransferResults(set(sending), set(recving), set(failed))

    def step(self):
        """One engine step; returns what vLLM's scheduler is told."""
        output = self.run(self.plan())
        self.scheduler.update_connector_output(output)
        for stats in (output.kv_connector_stats, self.scheduler.get_kv_connector_stats()):
            for name, tally in stats.tallies.items() if stats is not None else ():
                self.tallies[name].add(tally)
        return output

    def plan(self):
        """The scheduler's half of a step; returns what the workers get."""
        return pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(scheduler_output())))

    def run(self, metadata, finished_req_ids=frozenset()):
        """The workers' half of a step; returns their reports added up."""
        outputs = []
        for rank, connector in enumerate(self.workers):
            for index, fake in enumerate(connector.sub_connectors):
                if isinstance(fake, FakeBase):
                    results = self.reported.pop((rank, index), KVConnectorTransferResults())
                    fake.answers["get_transfer_results"] = lambda ids, results=results: results
            connector.handle_preemptions(metadata)
            connector.bind_connector_metadata(metadata)
            connector.start_load_kv(None)
            connector.wait_for_layer_load("layer")
            connector.wait_for_save()
            results = connector.get_transfer_results(set(finished_req_ids))
            output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
            output.kv_connector_output = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=connector.get_block_ids_with_load_errors(),
                kv_connector_stats=connector.get_kv_connector_stats(),
                kv_cache_events=connector.get_kv_connector_kv_cache_events(),
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            )
            connector.clear_connector_metadata()
            outputs.append(pickle.loads(pickle.dumps(output)))
        return self.aggregator.aggregate(outputs).kv_connector_output

    def tables_are_empty(self):
        return not tables.of_scheduler(self.scheduler) and not any(map(tables.of_worker, self.workers))

    def state(self, index=0):
        return self.scheduler._scheduler.supervisor.lifecycles[index].phase

    def fail(self):
        """A step in which the first child fails in the scheduler."""
        self.scheduler.sub_connectors[0].raising = {"build_connector_meta"}
        return self.step()

    def recover(self, steps=4):
        """Lets the pause pass and steps until the first child serves again."""
        self.clock.now += 100
        for _ in range(steps):
            self.step()
            if self.state() is Phase.SERVING:
                return True
        return False
