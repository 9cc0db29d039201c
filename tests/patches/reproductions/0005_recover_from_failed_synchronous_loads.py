# SPDX-License-Identifier: Apache-2.0
"""A synchronous load that fails and says so, under both policies, with a second request beside it."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tests.patches.lab import Lab, LabConnector, conclude, near, prompt, same

SYMPTOM = "wrong tokens after a failed synchronous load, and the prefix cache serves the bad blocks to the next request"


def main() -> None:
    lab = Lab(max_num_batched_tokens=4096)
    shared = prompt(2330, seed=1)
    tokens, sibling = shared + prompt(200, seed=2), shared + prompt(210, seed=3)
    cold = lab.run(tokens)[0]
    LabConnector.answer = lambda *_: (0, False)
    lab.reset()
    together, sibling_together = lab.run(tokens, sibling)
    LabConnector.answer = None
    lab.reset()
    lab.run(shared[:1300])
    LabConnector.snapshots = {key: pages for key, pages in LabConnector.snapshots.items() if len(key) == 1280}
    LabConnector.asynchronous = LabConnector.stores = False
    failing: set[str] = set()

    def report(loaded: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(finished_recving=loaded & failing, failed_recving=loaded & failing)

    def load(request_id: str) -> str:
        failing.add(request_id)
        return "noise"

    LabConnector.report, LabConnector.load = report, load
    lab.reset()
    bad, bad_sibling = lab.run(tokens, sibling)
    LabConnector.report, LabConnector.load = None, lambda request_id: "right"
    LabConnector.answer = lambda *_: (0, False)
    again = lab.run(tokens)[0]
    LabConnector.answer = None
    tries = len(LabConnector.attempts)

    # The policy "fail" gives up the request, and keeps nothing of it either.
    lab.reset()
    lab.scheduler.recompute_kv_load_failures = False
    LabConnector.report, LabConnector.load = report, load
    failed = lab.run(tokens)[0]
    LabConnector.report, LabConnector.load = None, lambda request_id: "right"
    LabConnector.answer = lambda *_: (0, False)
    after_failure = lab.run(tokens)[0]
    LabConnector.answer = None
    lab.reset()
    restored = lab.run(tokens)[0]

    symptom = not near(bad, together) and not same(again, cold)
    healthy = (
        near(bad, together)
        and tries == 3
        and near(bad_sibling, sibling_together)
        and same(again, cold)
        and failed["reason"] == "error"
        and same(after_failure, cold)
        and same(restored, cold)
        and restored["cached"] > 1000
        and not lab.scheduler.requests
    )
    seen = {"bad": bad, "again": again, "failed": failed, "after": after_failure, "restored": restored}
    summary = {name: (answer["reason"], answer["cached"], same(answer, cold)) for name, answer in seen.items()}
    summary["sibling"] = (bad_sibling["reason"], bad_sibling["cached"], near(bad_sibling, sibling_together))
    counted = dict(getattr(lab.scheduler, "kv_connector_faults", {}))
    conclude(symptom, healthy, tries=tries, counted=counted, **summary)


if __name__ == "__main__":
    main()
