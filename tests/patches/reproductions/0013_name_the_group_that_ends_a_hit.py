# SPDX-License-Identifier: Apache-2.0
"""Attention and states of a prompt leave the device cache in turn; the connector has nothing."""

import logging

from tests.patches.lab import Lab, LabConnector, conclude, error_of, prompt, same

SYMPTOM = "the hit ends at the minimum, and no line of the log names the group that is to blame"


class Lines(logging.Handler):
    """What the cache manager says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    lab = Lab()
    LabConnector.answer = lambda *_: (0, False)
    said = Lines()
    logging.getLogger("vllm.v1.core.kv_cache_manager").addHandler(said)
    tokens = prompt(2344, seed=1)
    cold = lab.run(tokens)[0]
    hits, right, errors = [], [], []
    for kind, first in ("Mamba", 0), ("FullAttention", 1), ("Mamba", 0):
        lab.forget(kind, first)
        errors.append(error_of(lambda: right.append(lab.run(tokens)[0])))
        hits.append(right[-1]["cached"])
    spoken = [line for line in said.lines if "MambaSpec" in line and "2304" in line]
    sound = not any(errors) and hits == [0, 0, 0] and all(same(answer, cold) for answer in right)
    conclude(sound and not said.lines, sound and len(spoken) == 1 == len(said.lines), hits=hits, lines=said.lines)


if __name__ == "__main__":
    main()
