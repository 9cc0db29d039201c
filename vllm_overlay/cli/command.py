# SPDX-License-Identifier: Apache-2.0
"""What a command says of itself, and the exit statuses that all commands share."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SOUND, PROBLEMS, USAGE, INTERRUPTED = 0, 1, 2, 130


@dataclass(slots=True, frozen=True)
class Command:
    """One command. Its file makes one of these; command_line.py lists it.

    ``run`` returns the exit status: SOUND or PROBLEMS. For wrong usage it raises one of command_line.py's FAILURES,
    which become a sentence and USAGE.
    """

    name: str
    summary: str
    """Its line in ``vllm-overlay --help``."""
    description: str
    """The first line of its own ``--help``."""
    examples: Mapping[str, str]
    """What to type after ``vllm-overlay`` -> what that does."""
    statuses: Mapping[int, str]
    """SOUND and PROBLEMS, as far as it returns them -> what that means."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    passes_on: bool = False
    """What it does not know is for vLLM's own parser: it is in ``arguments.vllm``, in its order."""
