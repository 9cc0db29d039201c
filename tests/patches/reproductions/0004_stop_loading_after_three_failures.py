# SPDX-License-Identifier: Apache-2.0
"""A connector whose loads always fail, with the policy ``recompute``."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tests.patches.lab import Lab, LabConnector, conclude, prompt, same

SYMPTOM = "a request whose loads fail is loaded again and again and never computed"


def main() -> None:
    lab = Lab()
    tokens, other = prompt(1344, seed=1), prompt(1200, seed=2)
    cold, cold_other = lab.run(tokens)[0], lab.run(other)[0]

    def failing(loaded: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=loaded)

    def attempts_of(request: list[int]) -> tuple[int, dict]:
        lab.reset()
        LabConnector.attempts.clear()
        LabConnector.report = failing
        answer = lab.run(request, max_steps=60)[0]
        LabConnector.report = None
        return len(LabConnector.attempts), answer

    default = getattr(lab.scheduler, "max_load_attempts", None)
    tries, answer = attempts_of(tokens)
    lab.scheduler.max_load_attempts = 2
    tries_other, answer_other = attempts_of(other)
    restored: dict = {}
    if answer_other:
        lab.reset()
        restored = lab.run(tokens)[0]
    healthy = (
        default == 3
        and (tries, tries_other) == (3, 2)
        and same(answer, cold)
        and same(answer_other, cold_other)
        and restored["cached"] > 1000
        and not lab.scheduler._failed_loads
    )
    conclude(tries > 20 and not answer, healthy, default=default, tries=[tries, tries_other])


if __name__ == "__main__":
    main()
