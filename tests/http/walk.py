# SPDX-License-Identifier: Apache-2.0
"""A page as a reader follows it: its commands in their order, a server in a terminal of its own, outputs compared."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from devtools.docs.page import CodeBlock, Page
from tests.python_path import REPOSITORY
from tests.waiting import PATIENCE_S, until

SERVER = "vllm-overlay serve"
IS_UP = "Application startup complete."
INTERRUPT = "Press Ctrl-C in the first terminal"


class WalkError(AssertionError):
    """The page says one thing and its commands do another."""


@dataclass(frozen=True, slots=True)
class Step:
    """One block of commands. ``shown``: what the page says that it prints, "" if it does not say.

    ``interrupts``: the page says, before this block, to end the server.
    """

    line: int
    commands: str
    shown: str
    interrupts: bool


def steps(page: Page) -> Iterator[Step]:
    """The page's blocks of language ``bash``, each with the block ``text`` that follows it."""
    last_line = 0
    for block, following in zip(page.code_blocks, [*page.code_blocks[1:], None], strict=True):
        if block.language != "bash":
            continue
        before = " ".join(" ".join(page.lines[last_line : block.line - 1]).split())
        yield Step(block.line, block.text, _shown(following), INTERRUPT in before)
        last_line = block.line


def _shown(block: CodeBlock | None) -> str:
    return block.text if block is not None and block.language == "text" else ""


def compare(shown: str, printed: str) -> None:
    """Every line that the page shows is printed, one after the other. Seconds and weights are measured: any will do.

    Raises WalkError.
    """
    expected, lines = _comparable(shown), _comparable(printed)
    places = range(len(lines) - len(expected) + 1)
    if not any(lines[place : place + len(expected)] == expected for place in places):
        raise WalkError(f"the page shows\n{shown}\nand the command prints\n{printed}")


def _comparable(text: str) -> list[str]:
    measured = re.compile(r"\b\d+\.\d+ m?s\b|\b\d\.\d\d\b(?!\.)")
    return [" ".join(measured.sub("#", line).split()) for line in text.splitlines() if line.strip()]


class Walk:
    """A context manager; whatever it has started is killed at its end.

    ``replaced``: texts of the page -> what takes their place here. ``directory`` gets the server's log.
    """

    def __init__(self, directory: Path, replaced: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self._replaced = replaced
        self._environment = {**os.environ, **environment}
        self._log = directory / "server.log"
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Walk":
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and all of its group
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()

    def take(self, step: Step) -> None:
        """Raises WalkError if a command fails or prints something else than the page says."""
        if step.interrupts:
            self._interrupt()
        if SERVER in step.commands:
            self._serve(step)
        else:
            done = subprocess.run(
                self._command(step), env=self._environment, cwd=REPOSITORY, capture_output=True, text=True
            )
            if done.returncode:
                raise WalkError(f"line {step.line} ends with status {done.returncode}:\n{done.stdout}{done.stderr}")
            compare(self._here(step.shown), done.stdout)

    def _here(self, text: str) -> str:
        for theirs, ours in self._replaced.items():
            text = text.replace(theirs, ours)
        return text

    def _command(self, step: Step) -> list[str]:
        return ["bash", "-euo", "pipefail", "-c", self._here(step.commands)]

    def _serve(self, step: Step) -> None:
        """In a session of its own, as in another terminal; returns once it is up."""
        if self._server is not None:
            raise WalkError(f"line {step.line} starts a second server beside the first")
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                self._command(step),
                env=self._environment,
                cwd=REPOSITORY,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        server = self._server

        def is_up() -> bool:
            has_ended = server.poll() is not None
            text = self._log.read_text()
            if IS_UP not in text and has_ended:
                raise WalkError(f"the server of line {step.line} did not start:\n{text[-4000:]}")
            return IS_UP in text

        until(is_up, f"the start of the server of line {step.line}")

    def _interrupt(self) -> None:
        """Ctrl-C goes to every process of a terminal."""
        if self._server is None:
            raise WalkError("the page ends a server that it has not started")
        os.killpg(self._server.pid, signal.SIGINT)
        self._server.wait(PATIENCE_S)
        self._server = None
