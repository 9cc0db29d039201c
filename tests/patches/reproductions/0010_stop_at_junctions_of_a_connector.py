# SPDX-License-Identifier: Apache-2.0
"""A connector that knows the attention of prompts further than any state, and says where they part (the junction)."""

from typing import Any

from tests.patches.lab import Lab, LabConnector, conclude, prompt, same

SYMPTOM = "prompts that share less than a block never hit: 0, 0, 0, 0, 0"


def main() -> None:
    lab = Lab(max_num_batched_tokens=4096)
    LabConnector.asynchronous = True
    seen: list[tuple[int, ...]] = []

    def covered(request: Any, num_local: int) -> tuple[int, bool]:
        """As far as some earlier prompt goes, in match units; loads nothing that has no state."""
        tokens = tuple(request.all_token_ids)
        common = [sum(1 for _ in _common(tokens, other)) for other in seen]
        seen.append(tokens)
        junction = max([*common, 0]) // 64 * 64
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, junction)
        states = [len(key) for key in LabConnector.snapshots if len(key) < len(tokens) and tokens[: len(key)] == key]
        matched = max([*states, num_local]) - num_local
        return matched, matched > 0

    shared = prompt(900, seed=1)
    prompts = [shared + prompt(500, seed=2 + sibling) for sibling in range(5)]
    LabConnector.answer = lambda *_: (0, False)
    cold = []
    for tokens in prompts:
        lab.reset()
        cold.append(lab.run(tokens)[0])
    LabConnector.snapshots.clear()
    LabConnector.answer = covered
    short = []
    for tokens in prompts:
        lab.reset()
        short.append(lab.run(tokens)[0])
    hits = [answer["cached"] for answer in short]
    right = all(same(one, other) for one, other in zip(short, cold, strict=True))

    conclude(max(hits) == 0, hits[:2] == [0, 0] and min(hits[2:]) >= 896 and right, hits=hits, right=right)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> Any:
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            return
        yield mine


if __name__ == "__main__":
    main()
