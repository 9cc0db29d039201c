# SPDX-License-Identifier: Apache-2.0
"""vLLM's own MultiConnector over a child with stats of its own and no metrics."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from tests.patches.lab import Lab, conclude, config, error_of, prompt, same

SYMPTOM = "AssertionError: StatsConnector is not contained in the list of registered connectors"


def main() -> None:
    KVConnectorFactory.register_connector("StatsConnector", "tests.patches.lab", "StatsConnector")
    child = {**config(), "kv_connector": "StatsConnector", "kv_connector_module_path": None}
    lab = Lab({**config(connectors=[child]), "kv_connector": "MultiConnector", "kv_connector_module_path": None})
    tokens = prompt(1344, seed=1)
    answers = []

    def twice() -> None:
        answers.append(lab.run(tokens)[0])
        lab.reset()
        answers.append(lab.run(tokens)[0])

    error = error_of(twice)
    symptom = error.startswith("AssertionError: StatsConnector is not contained in the list of registered connectors")
    conclude(symptom, not error and same(*answers) and answers[1]["cached"] > 1000, error=error)


if __name__ == "__main__":
    main()
