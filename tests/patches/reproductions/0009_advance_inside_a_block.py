# SPDX-License-Identifier: Apache-2.0
"""A long prefill, and a short request behind it, while another request decodes and the budget is one block."""

from typing import Any

from tests.patches.lab import Lab, LabConnector, N, conclude, prompt, same

SYMPTOM = "a prefill and everything behind it wait until the running decode is over"


def race(lab: Lab, budget: int, seed: int, num_decoded: int) -> dict[str, Any]:
    """Steps until a 3000-token and then a 50-token request are first scheduled, and the share of the budget used."""
    scheduler = lab.scheduler
    scheduler.max_num_scheduled_tokens = budget
    lab.start(prompt(100, seed=seed), max_tokens=num_decoded)
    lab.engine.step()
    names = [lab.start(prompt(size, seed=seed + size), max_tokens=4) for size in (3000, 50)]
    first: dict[str, int] = {}
    steps = used = 0
    while lab.engine.has_unfinished_requests():
        waiting = [request for request in scheduler.requests.values() if request.num_prompt_tokens > 100]
        prefilling = any(request.num_computed_tokens < request.num_prompt_tokens for request in waiting)
        before = {name: request.num_computed_tokens for name, request in scheduler.requests.items()}
        lab.engine.step()
        steps += 1
        scheduled = {name: request.num_computed_tokens - before[name] for name, request in scheduler.requests.items()}
        for name in names:
            if any(full.startswith(name + "-") and num for full, num in scheduled.items()):
                first.setdefault(name, steps)
        if prefilling:
            used += sum(scheduled.values())
            last = steps
    return {"first": [first[name] for name in names], "used": round(used / (last * budget), 2)}


def main() -> None:
    lab = Lab(max_num_batched_tokens=4096)
    LabConnector.answer = lambda *_: (0, False)
    tokens = prompt(3000, seed=3010)
    cold = lab.run(tokens)[0]
    warm = lab.run(tokens)[0]
    lab.reset()
    narrow = race(lab, N, seed=10, num_decoded=150)
    resent = lab.run(tokens)[0]
    wide = {}
    for budget in (2048, 2303, 4096):
        lab.reset()
        wide[budget] = race(lab, budget, seed=10, num_decoded=20)
    healthy = max(narrow["first"]) <= 3 and resent["cached"] == warm["cached"] and same(resent, cold)
    conclude(min(narrow["first"]) > 100, healthy, narrow=narrow, cached=[warm["cached"], resent["cached"]], wide=wide)


if __name__ == "__main__":
    main()
