# SPDX-License-Identifier: Apache-2.0
"""Two requests of one step: the first loads a block synchronously, the second hits a part of it. No load fails.

No engine runs: vLLM's scheduler with the oracle of ``devtools/poison``, which does each step in the runner's order.
"""

from random import Random

from vllm.config import KVTransferConfig

from devtools.poison.connector import PATH, Habits, PoisonConnector
from devtools.poison.memory import Prefixes
from devtools.poison.worker import POISONED_TOKEN, Worker
from devtools.scheduler_lab import LabSettings, make_request, make_scheduler, runner_output
from tests.patches.lab import conclude

SYMPTOM = "wrong tokens of a request that hits a part of a block which another one loads in the same step"
BLOCK, UNIT = 8, 2


def main() -> None:
    PoisonConnector.habits = Habits(Random(0), UNIT)
    loads = {"long": 21}

    def answer(self: PoisonConnector, request, num_computed: int) -> tuple[int, bool]:
        self._asked[request.request_id] = (num_computed, False)
        return max(loads.get(request.request_id, 0) - num_computed, 0), False

    PoisonConnector.get_num_new_matched_tokens = answer
    settings = LabSettings(
        block_size=BLOCK,
        match_unit=UNIT,
        budget=20 * BLOCK,
        num_blocks=100,
        max_context=128,
        kv_transfer_config=KVTransferConfig(
            kv_connector="PoisonConnector", kv_connector_module_path=PATH, kv_role="kv_both"
        ),
    )
    scheduler = make_scheduler(settings)
    worker = Worker(Prefixes(), BLOCK, 1, is_async=False, reports_blocks=False)
    trunk = list(range(10, 50))
    said: dict[str, list[int]] = {}
    began: dict[str, int] = {}

    def step(number: int) -> None:
        output = scheduler.schedule()
        result = worker.execute(output)
        began.update({new.req_id: number for new in output.scheduled_new_reqs})
        for name, tokens in result.sampled.items():
            said.setdefault(name, []).extend(tokens)
        scheduler.update_from_output(output, runner_output(result.sampled, result.report))

    scheduler.add_request(make_request("short", trunk[:7], 1, settings))
    for number in range(3):
        step(number)
    scheduler.add_request(make_request("long", trunk[:23], 2, settings))
    scheduler.add_request(make_request("sibling", [*trunk[:17], 9], 2, settings))
    for number in range(3, 9):
        step(number)

    right = all(POISONED_TOKEN not in tokens for tokens in said.values())
    healthy = right and [len(said[name]) for name in ("short", "long", "sibling")] == [1, 2, 2]
    conclude(POISONED_TOKEN in said["sibling"], healthy and began["sibling"] == 4, said=said, began=began)


if __name__ == "__main__":
    main()
