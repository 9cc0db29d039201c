# SPDX-License-Identifier: Apache-2.0
"""Random schedules with one draft a step, in which a prompt's last pass keeps a checkpoint, as Mamba2's does on a GPU.

The worker is an oracle without a model: a CPU keeps no checkpoints.
"""

from devtools.poison.seed import Column, run_seed
from tests.patches.lab import conclude

SYMPTOM = "a prompt goes on from a checkpoint that was written over its running state"
COLUMN = Column(num_state_groups=1, is_async=False, kind="checkpoints", below_block=False)


def main() -> None:
    problems = {seed: problem for seed in range(100) if (problem := run_seed(seed, COLUMN).problem)}
    conclude(any("poison" in problem for problem in problems.values()), not problems, problems=problems)


if __name__ == "__main__":
    main()
