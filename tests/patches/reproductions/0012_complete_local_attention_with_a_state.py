# SPDX-License-Identifier: Apache-2.0
"""The device cache has lost the states of a prompt and kept its attention; the connector still has both."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tests.patches.lab import Lab, LabConnector, conclude, prompt, same

SYMPTOM = "local attention 2304, local state 0, external state at 2304: the attention is loaded once more"


def main() -> None:
    lab = Lab()
    groups = lab.scheduler.kv_cache_config.kv_cache_groups
    recurrent = [i for i, group in enumerate(groups) if "Mamba" in repr(group.kv_cache_spec)]
    hits, attention_pages, right = [], [], []

    def hit_without_states(tokens: list[int], cold: dict[str, Any]) -> None:
        lab.forget("Mamba")
        LabConnector.loaded_pages.clear()
        answer = lab.run(tokens)[0]
        hits.append(answer["cached"])
        attention_pages.append([index for group, index in LabConnector.loaded_pages if group not in recurrent])
        right.append(same(answer, cold))

    tokens, longer = prompt(2344, seed=1), prompt(2344, seed=1) + prompt(1300, seed=2)
    cold = lab.run(tokens)[0]
    lab.reset()
    lab.run(tokens)  # brings the attention back to the device
    hit_without_states(tokens, cold)  # of a connector that has not said that it can leave it out
    LabConnector.completes = True
    hit_without_states(tokens, cold)

    # The attention goes on to 3584, the last state that the connector has lies at 2304 or, inside a block, at 2496.
    LabConnector.stores = False
    cold_longer = lab.run(longer)[0]
    hit_without_states(longer, cold_longer)
    LabConnector.stores = True
    lab.run(longer[:2500])
    LabConnector.stores = False
    hit_without_states(longer, cold_longer)

    # A failed load leaves local attention as it was.
    LabConnector.load = lambda request_id: "noise"
    LabConnector.report = lambda loaded: KVConnectorTransferResults(finished_recving=loaded, failed_recving=loaded)
    hit_without_states(tokens, cold)
    LabConnector.report = None
    LabConnector.load = lambda request_id: "right"
    hit_without_states(tokens, cold)

    # A synchronous load is not completed.
    LabConnector.asynchronous = False
    hit_without_states(tokens, cold)

    conclude(
        symptom=hits[:2] == [2304, 2304] and attention_pages[:2] == [[0, 1], [0, 1]] and all(right),
        healthy=hits == [2304, 2304, 2304, 2496, 0, 2304, 2304]
        and attention_pages[:4] == [[0, 1], [], [], [2]]
        and attention_pages[5:] == [[], [0, 1]]
        and all(right),
        hits=hits,
        attention_pages=attention_pages,
        right=right,
    )


if __name__ == "__main__":
    main()
