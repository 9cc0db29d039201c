# SPDX-License-Identifier: Apache-2.0
"""A long prefill, and a short request behind it, while another request decodes and the budget is one block."""

from tests.patches.lab import Lab, LabConnector, N, conclude, prompt, same

SYMPTOM = "a prefill and everything behind it wait until the running decode is over"


def scheduled_by_step(lab: Lab) -> dict[str, int]:
    """Runs a step; what it scheduled of each request that is still there."""
    requests = lab.scheduler.requests
    before = {name: request.num_computed_tokens for name, request in requests.items()}
    lab.engine.step()
    return {name: request.num_computed_tokens - before[name] for name, request in requests.items()}


def race(lab: Lab) -> list[int]:
    """Steps until a 3000-token and then a 50-token request are first scheduled beside a decode of 200 tokens."""
    lab.scheduler.max_num_scheduled_tokens = N
    lab.start(prompt(100, seed=10), max_tokens=200)
    lab.engine.step()
    names = [lab.start(prompt(size, seed=10 + size), max_tokens=4) for size in (3000, 50)]
    first: dict[str, int] = {}
    step = 0
    while lab.engine.has_unfinished_requests():
        step += 1
        for full, num in scheduled_by_step(lab).items():
            for name in names:
                if num and full.startswith(name + "-"):
                    first.setdefault(name, step)
    return [first[name] for name in names]


def budget_use(lab: Lab, budget: int) -> float:
    """The share of the budget that 8 steps use with one decode and more prefill waiting than they can take.

    Told, not wanted: behind another prefill one waits for a block, with the patch and without.
    """
    lab.scheduler.max_num_scheduled_tokens = budget
    names = [lab.start(prompt(100, seed=20), max_tokens=50)]
    lab.engine.step()
    names += [lab.start(prompt(8000, seed=21 + n), max_tokens=1) for n in range(6)]
    used = sum(sum(scheduled_by_step(lab).values()) for _ in range(8))
    lab.engine.abort_request(names)
    return round(used / (8 * budget), 2)


def main() -> None:
    lab = Lab(max_num_batched_tokens=4096)
    LabConnector.answer = lambda *_: (0, False)
    tokens = prompt(3000, seed=3010)
    cold = lab.run(tokens)[0]
    warm = lab.run(tokens)[0]
    lab.reset()
    first = race(lab)
    resent = lab.run(tokens)[0]
    used = {}
    for budget in (2 * N - 1, 4096):
        lab.reset()
        used[budget] = budget_use(lab, budget)
    healthy = max(first) <= 3 and resent["cached"] == warm["cached"] and same(resent, cold)
    conclude(min(first) > 190, healthy, first=first, cached=[warm["cached"], resent["cached"]], used=used)


if __name__ == "__main__":
    main()
