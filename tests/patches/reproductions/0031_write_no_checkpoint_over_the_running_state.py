# SPDX-License-Identifier: Apache-2.0
"""Random schedules with one draft a step, in which a prompt's last pass keeps a checkpoint, as Mamba2's does on a GPU.

The worker is an oracle without a model: a CPU keeps no checkpoints.
"""

from devtools.poison.seed import Column
from tests.patches.lab import conclude_of_seeds

SYMPTOM = "a checkpoint is written over the running state, which is cached and offered"
COLUMN = Column(num_state_groups=1, is_async=False, kind="checkpoints", below_block=False)


if __name__ == "__main__":
    conclude_of_seeds(COLUMN)
