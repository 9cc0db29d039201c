# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine in a process of its own, spoken to by JSON lines. Tests use it as a context manager."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.python_path import REPOSITORY, python_path
from tests.warm import WarmProcess
from tools.server import KV_CACHE_BYTES


@dataclass(frozen=True)
class Output:
    """What one request answered. ``num_cached_tokens`` counts device and external hits, as vLLM reports them."""

    token_ids: list[int]
    logprobs: list[float]
    num_cached_tokens: int

    def same_as(self, other: "Output", tolerance: float = 0.0) -> bool:
        """Equal tokens, and logprobs of the chosen tokens within ``tolerance`` (NaN is never equal)."""
        return self.token_ids == other.token_ids and all(
            abs(mine - theirs) <= tolerance for mine, theirs in zip(self.logprobs, other.logprobs, strict=True)
        )


RUNNING: "list[Engine]" = []
"""The engines of this process, for the report of a test that fails (tests/conftest.py)."""


class EngineError(RuntimeError):
    """The engine's process failed; the message ends with its log."""


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Random tokens; two seeds differ in the first token already with probability 255/256."""
    source = random.Random(seed)
    return [source.randrange(256) for _ in range(num_tokens)]


def cpu_child(**settings: Any) -> dict[str, Any]:
    """A CPU-tier HybridOffloadConnector as a MultiConnector's child."""
    return _child({"name": "cpu", "tier": "cpu", "capacity_bytes": "512 MiB", "hybrid_chunk_size": 64, **settings}, 1.0)


def disk_child(root: Path, **settings: Any) -> dict[str, Any]:
    """A disk-tier HybridOffloadConnector as a MultiConnector's child."""
    own = {"name": "disk", "tier": "disk", "root": str(root), "capacity_bytes": "1 GiB", "hybrid_chunk_size": 64}
    return _child({**own, **settings}, 0.5)


def _child(settings: dict[str, Any], load_weight: float) -> dict[str, Any]:
    # A number, because "auto" rests on what this machine measures.
    settings = {"load_weight": load_weight, **settings}
    return {"kv_connector": "HybridOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}


def multi(*children: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The ``--kv-transfer-config`` of a weighted MultiConnector."""
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "vllm_overlay.multi_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children), **settings},
    }


class Engine:
    """``arguments`` are those of ``vllm.LLM``; defaults make a small engine on the tiny model with match unit 64.

    ``launcher`` is what the process's command is begun with, say to run it in namespaces of its own.
    """

    def __init__(
        self, model: Path, environment: dict[str, str] | None = None, launcher: Sequence[str] = (), **arguments: Any
    ) -> None:
        self._arguments = {
            "model": str(model),
            "max_model_len": 8192,
            "max_num_batched_tokens": 2304,
            "prefix_match_unit": 64,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            "disable_log_stats": False,
            **arguments,
        }
        self._environment = environment or {}
        self._launcher = launcher
        self._is_asked = False

    def __enter__(self) -> "Engine":
        self._log = tempfile.NamedTemporaryFile(prefix="engine-", suffix=".log", delete=False)
        command = ["-m", "tests.engine.driver", json.dumps(self._arguments)]
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "PYTHONPATH": python_path(),
            "TORCHDYNAMO_DISABLE": "1",  # or the first request compiles, for two seconds, how logprobs are ranked
            **self._environment,
        }
        self._process: WarmProcess | subprocess.Popen[str]
        if not self._launcher:
            self._process = WarmProcess(command, environment, REPOSITORY, Path(self._log.name))
        else:
            self._process = subprocess.Popen(
                [*self._launcher, sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
                cwd=REPOSITORY,
                text=True,
                start_new_session=True,
            )
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise
        RUNNING.append(self)
        return self

    def __exit__(self, _: object = None, error: BaseException | None = None, *__: object) -> None:
        if self in RUNNING:
            RUNNING.remove(self)
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        if error is not None and not isinstance(error, EngineError):
            error.add_note(f"The engine's log ends with:\n{self.log[-6000:]}")
        self._log.close()
        os.unlink(self._log.name)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def report(self) -> str:
        """What somebody wants to know whose test failed while it ran. It is asked unless it owes an answer."""
        try:
            state = "it owes an answer" if self._is_asked else "\n".join(map(str, self.call("state")))
        except Exception as error:  # the failure of the test has to be shown, whatever happens here
            state = f"{type(error).__name__}: {error}"
        return f"{self._arguments}\n{state}\n{self.log[-6000:]}"

    @property
    def log(self) -> str:
        """What the engine has logged so far."""
        return Path(self._log.name).read_text(errors="replace")

    def call(self, operation: str, **arguments: Any) -> Any:
        """One operation of the driver."""
        assert self._process.stdin is not None
        self._is_asked = True
        try:
            self._process.stdin.write(json.dumps({"operation": operation, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(self.log[-6000:]) from None
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                self._is_asked = False
                answer = json.loads(line.removeprefix("ANSWER "))
                if "error" in answer:
                    raise EngineError(answer["error"] + "\n" + self.log[-6000:])
                return answer["result"]
        self._process.wait()
        raise EngineError(self.log[-6000:])

    def generate(self, tokens: list[int], max_tokens: int = 8, **options: Any) -> Output:
        """One request, alone."""
        return self.generate_many([tokens], max_tokens, **options)[0]

    def generate_many(self, prompts: list[list[int]], max_tokens: int = 8, **options: Any) -> list[Output]:
        """Requests handed to the engine together."""
        answers = self.call("generate", prompts=prompts, max_tokens=max_tokens, **options)
        return [Output(**answer) for answer in answers]

    def reset_device_cache(self) -> None:
        """Empties the device prefix cache; external tiers keep what they have."""
        self.call("reset")

    def wait_for_stores(self) -> None:
        """Steps the engine until no store is pending."""
        self.call("wait_for_stores")

    def evict(self) -> None:
        """Of all that was computed until now the tiers alone have something."""
        self.wait_for_stores()
        self.reset_device_cache()

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all samples of one Prometheus metric that carry ``labels``; observations of a histogram."""
        return float(self.call("metric", name=name, labels=labels))
