# SPDX-License-Identifier: Apache-2.0
"""Random schedules with drafts, asynchronous and with few blocks: what is offered is still there when the step ends.

The worker is an oracle without a model: it knows what each block holds.
"""

from devtools.poison.seed import Column
from tests.patches.lab import conclude_of_seeds

SYMPTOM = "a state is offered to the connector after another request has been given its block"
COLUMN = Column(num_state_groups=1, is_async=True, kind="drafts", below_block=False)


if __name__ == "__main__":
    conclude_of_seeds(COLUMN)
