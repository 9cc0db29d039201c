# SPDX-License-Identifier: Apache-2.0
"""A connector that reports a load twice, and transfers of requests that wait for none."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tests.patches.lab import Lab, LabConnector, conclude, error_of, prompt, same

SYMPTOM = "AssertionError in _update_from_kv_xfer_finished; blocks freed while the connector still sends them"


def main() -> None:
    lab = Lab()
    tokens = prompt(1344, seed=1)
    cold = lab.run(tokens)[0]
    seen: set[str] = set()
    answers, errors, freed_early = [], [], False

    def load_again_and_again(loaded: set[str]) -> KVConnectorTransferResults:
        seen.update(loaded)
        return KVConnectorTransferResults(finished_recving=set(seen))

    def send_what_is_not_waited_for(loaded: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(
            finished_recving=loaded, finished_sending={*lab.scheduler.requests, "unknown"}
        )

    for report in load_again_and_again, send_what_is_not_waited_for:
        lab.llm.reset_prefix_cache()
        LabConnector.report = report
        errors.append(error_of(lambda: answers.append(lab.run(tokens)[0])))
        LabConnector.report = None
    if not any(errors):
        LabConnector.delay_free = True
        LabConnector.report = load_again_and_again
        answers.append(lab.run(tokens)[0])
        (waiting,) = lab.scheduler.requests
        seen.add(waiting)
        lab.run(prompt(20, seed=2), max_tokens=2)
        freed_early = waiting not in lab.scheduler.requests
        sending = set(lab.scheduler.requests)
        LabConnector.delay_free = False
        LabConnector.report = lambda loaded: KVConnectorTransferResults(finished_sending=sending)
        lab.run(prompt(20, seed=2), max_tokens=2)
        LabConnector.report = None
    left = sorted(lab.scheduler.requests)
    counted = dict(getattr(lab.scheduler, "kv_connector_faults", {}))
    asserted = [error.startswith("AssertionError") for error in errors]
    restored = all(same(answer, cold) and answer["cached"] > 1000 for answer in answers)
    healthy = not any(errors) and restored and not left and not freed_early and len(counted) == 2
    conclude(all(asserted), healthy, errors=errors, counted=counted, left=left, freed_early=freed_early)


if __name__ == "__main__":
    main()
