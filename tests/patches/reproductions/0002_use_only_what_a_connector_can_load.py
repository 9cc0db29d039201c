# SPDX-License-Identifier: Apache-2.0
"""A connector that answers with a negative number, with too many tokens and with the whole prompt."""

from tests.patches.lab import Lab, LabConnector, conclude, error_of, prompt, same

SYMPTOM = "Counters can only be incremented by non-negative amounts; the last token of a loaded prompt is applied twice"


def main() -> None:
    lab = Lab()
    tokens, longer, short = prompt(1344, seed=1), prompt(1500, seed=2), prompt(1170, seed=3)
    cold, cold_longer = lab.run(tokens)[0], lab.run(longer, max_tokens=2)[0]
    prefix = tokens[:1280]
    cold_prefix = lab.run(prefix)[0]
    assert tuple(prefix) in LabConnector.snapshots, [len(key) for key in LabConnector.snapshots]
    errors, answers = [], {}

    def asked(name: str, request: list[int], answer: int, asynchronous: bool) -> None:
        if name != "negative":
            lab.reset()
        LabConnector.answer = lambda _, num_local: (answer, asynchronous)
        if error := error_of(lambda: answers.update({name: lab.run(request)[0]})):
            errors.append(f"{name}: {error}")

    asked("whole", prefix, len(prefix), True)
    LabConnector.answer = lambda *_: (0, False)
    cold_short = lab.run(short)[0]
    asked("negative", short, -1, False)
    if not errors:
        asked("async nothing", tokens, 0, True)
        asked("too large", tokens, 10**6, True)
        asked("too large at once", tokens, 10**6, False)
        asked("whole at once", tokens, len(tokens), False)
        LabConnector.answer = None
        lab.reset()
        asked_right = lab.run(longer, max_tokens=2)[0]
    twice = "whole" in answers and not same(answers["whole"], cold_prefix)
    healthy = (
        not errors
        and same(answers.pop("whole"), cold_prefix)
        and same(answers.pop("negative"), cold_short)
        and all(same(answer, cold) for answer in answers.values())
        and same(asked_right, cold_longer)
        and asked_right["cached"] > 0
    )
    counted = dict(getattr(lab.scheduler, "kv_connector_faults", {}))
    negative = any("incremented by non-negative" in error for error in errors)
    conclude(twice and negative, healthy and sum(counted.values()) == 5, errors=errors, counted=counted, twice=twice)


if __name__ == "__main__":
    main()
