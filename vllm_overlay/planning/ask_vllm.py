# SPDX-License-Identifier: Apache-2.0
"""The asking side of a dry start: a process that has vLLM, and what it answers."""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from vllm_overlay.config import ConfigError
from vllm_overlay.planning.question import Answer, Question, Reply

_MODULE = "vllm_overlay.dry_start"
_TIMEOUT_S = 600.0


def ask_vllm(question: Question, timeout_s: float = _TIMEOUT_S) -> Reply:
    """What the vLLM of this Python works out, in a process of its own. Takes as long as an import of it.

    Raises:
        ConfigError: there is no vLLM, it or the connector refuses the question, or the process did not answer.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"{sys.executable} has no vLLM to ask: run this in the environment that will serve the model")
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
            raise ConfigError(f"vLLM could not be asked: {_end_of(log)}")
        answer = msgspec.json.decode(answered.read_bytes(), type=Answer)
    if answer.reply is None:
        raise ConfigError(answer.refusal)
    return answer.reply


def _end_of(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
