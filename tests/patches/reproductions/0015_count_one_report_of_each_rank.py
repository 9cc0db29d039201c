# SPDX-License-Identifier: Apache-2.0
"""Two ranks, of which the first reports everything twice; the aggregator is all that lies between them and the rest."""

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.patches.lab import conclude

SYMPTOM = "a transfer counts as done on all ranks although one of two has not reported it"


class Ranks:
    """Workers of one engine."""

    def __init__(self, num_ranks: int, expected: int) -> None:
        self.aggregator = KVOutputAggregator(expected)
        self.num_ranks = num_ranks

    def step(self, **reports: set[str]) -> tuple[set[str], set[str]]:
        """One step in which the ranks named ``rank0``, ``rank1`` report both kinds; what counts as done."""
        outputs = []
        for rank in range(self.num_ranks):
            reported = reports.get(f"rank{rank}")
            transfers = KVConnectorOutput(finished_sending=reported, finished_recving=reported)
            outputs.append(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=transfers))
        done = self.aggregator.aggregate(outputs).kv_connector_output
        return done.finished_sending or set(), done.finished_recving or set()


def main() -> None:
    ranks = Ranks(2, expected=2)
    early = [ranks.step(rank0={"a"}), ranks.step(rank0={"a", "b"}), ranks.step(rank0={"b"})]
    then = [ranks.step(rank1={"a", "b"}), ranks.step(rank0={"a"}), ranks.step(rank1={"a"})]
    nothing, both, again = (set(), set()), ({"a", "b"}, {"a", "b"}), ({"a"}, {"a"})
    named = Ranks(2, expected=3)  # a connector that wants three reports gets them from any rank
    counted = [named.step(rank0={"c"}), named.step(rank0={"c"}), named.step(rank1={"c"})]
    healthy = (
        early == [nothing, nothing, nothing]
        and then == [both, nothing, again]
        and counted == [nothing, nothing, ({"c"}, {"c"})]
        and not ranks.aggregator._reported
    )
    conclude(early[1] == again, healthy, early=early, then=then, counted=counted)


if __name__ == "__main__":
    main()
