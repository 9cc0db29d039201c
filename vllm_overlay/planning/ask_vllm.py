# SPDX-License-Identifier: Apache-2.0
"""The asking side of a dry start: a process that has vLLM, and what it answers."""

import importlib.util
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vllm_overlay.config import ConfigError
from vllm_overlay.planning.engine_layout import EngineLayout
from vllm_overlay.planning.question import Question

_MODULE = "vllm_overlay.dry_start"
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Either a layout, or the sentence with which the connector or vLLM refuses to start."""

    layout: EngineLayout | None = None
    refusal: str = ""


def has_vllm() -> bool:
    """Whether this Python has vLLM; does not import it."""
    return importlib.util.find_spec("vllm") is not None


def ask_vllm(question: Question, timeout_s: float = _TIMEOUT_S) -> EngineLayout:
    """The layout that vLLM itself works out, in a process of its own. Takes as long as an import of vLLM.

    Raises:
        ConfigError: vLLM or the connector refuses the question, or the process did not answer.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-plan-") as directory:
        asked, answered, log = (Path(directory) / name for name in ("question", "answer", "log"))
        asked.write_bytes(msgspec.json.encode(question))
        with log.open("wb") as output:
            try:
                subprocess.run(
                    [sys.executable, "-m", _MODULE, str(asked), str(answered)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise ConfigError(f"vLLM did not answer within {timeout_s:g} seconds: {_end_of(log)}") from error
        if not answered.exists():
            raise ConfigError(f"vLLM could not be asked about {question.model}: {_end_of(log)}")
        answer = msgspec.json.decode(answered.read_bytes(), type=Answer)
    if answer.layout is None:
        raise ConfigError(answer.refusal)
    return answer.layout


def _end_of(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
