# SPDX-License-Identifier: Apache-2.0
"""What a server has answered to the prompts of a verification, and the file that keeps it over a restart."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from vllm_overlay.common.whole_file import replace_file
from vllm_overlay.server.api_client import Completion
from vllm_overlay.verification.prompts import Prompt

NUM_ANSWER_TOKENS = 8
LARGEST_FILE_BYTES = 64 << 20
"""A run of 8,192 tokens a prompt takes a third of a megabyte."""


class NothingToVerify(Exception):
    """The server cannot be verified. The message says why, and what to change."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What a prompt's answer is, computed twice, and as a hit in vLLM's own device cache (None: not asked)."""

    prompt: Prompt
    computed: Completion
    computed_again: Completion
    by_device: Completion | None

    def check(self) -> None:
        """Raises ValueError for what no run has saved."""
        if not 1 <= self.prompt.boundary < len(self.prompt.tokens):
            raise ValueError(f"no restore point in {self.prompt.name!r}")
        for answer in (self.computed, self.computed_again, self.by_device or self.computed):
            if {len(answer.token_ids), len(answer.logprobs), len(answer.candidates)} != {NUM_ANSWER_TOKENS}:
                raise ValueError(f"an answer to {self.prompt.name!r} does not have {NUM_ANSWER_TOKENS} tokens")


class Computed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a later life of the server is compared with.

    ``salt`` keeps this run's prompts apart from everything else in the tiers. ``server_started`` is when the server's
    process was, in seconds since the epoch; 0.0: it does not say.
    """

    format: Literal["vllm-overlay verification 1"] = "vllm-overlay verification 1"
    salt: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    server_started: float
    answers: Annotated[list[Answers], msgspec.Meta(min_length=1)]

    @property
    def num_equal(self) -> int:
        """Prompts whose two computed answers are equal to the last bit."""
        return sum(answers.computed.same_as(answers.computed_again) for answers in self.answers)

    def write(self, path: Path) -> None:
        """Whole or not at all, for its owner alone. Raises OSError."""
        replace_file(path, msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> "Computed":
        """Raises OSError, and NothingToVerify for a file that ``write`` did not make."""
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
        try:
            if len(data) > LARGEST_FILE_BYTES:
                raise ValueError(f"more than {LARGEST_FILE_BYTES} bytes")
            computed = msgspec.json.decode(data, type=cls)
            for answers in computed.answers:
                answers.check()
        except (ValueError, RecursionError) as error:
            raise NothingToVerify(f"{path} was not written by verify --save, or not whole: {error}") from error
        return computed
