# SPDX-License-Identifier: Apache-2.0
"""Python processes that begin with vLLM and what it needs imported: forked from one that has done nothing else.

It saves each process of vLLM seven seconds of a core. Nothing was computed before the fork.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tests.processor.sitecustomize import VARIABLE
from tests.python_path import python_path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])


class WarmProcess:
    """``python *arguments``, which begin with "-m" and a module or with a script, in a session of its own.

    Its standard input and output are text files here; what it writes to standard error is appended to ``log``. So is
    all output of one that has nobody to talk to.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        log: Path,
        is_spoken_to: bool = True,
    ) -> None:
        if environment.get(VARIABLE) != os.environ.get(VARIABLE):
            raise ValueError(f"{VARIABLE} is read when torch is imported, and in a forked process that is over")
        path = environment.get("PYTHONPATH", "")
        if not path.endswith(python_path()) or any(Path(each, "vllm").exists() for each in path.split(os.pathsep)):
            raise ValueError("another vLLM may lie on this path, and in a forked process vLLM is imported already")
        their_input, our_output = _CONTEXT.Pipe(duplex=False)
        our_input, their_output = _CONTEXT.Pipe(duplex=False)
        everything = (list(arguments), dict(environment), directory, log, is_spoken_to, their_input, their_output)
        self._process = _CONTEXT.Process(target=_become, args=everything, name="MainProcess")
        self._process.start()
        their_input.close()
        their_output.close()
        self.stdin = os.fdopen(os.dup(our_output.fileno()), "w")
        self.stdout = os.fdopen(os.dup(our_input.fileno()))
        our_output.close()
        our_input.close()

    def __enter__(self) -> "WarmProcess":
        return self

    def __exit__(self, *_: object) -> None:
        """Kills it, and what it has started, unless it has ended."""
        self.stdin.close()
        if self._process.exitcode is None:
            # It may end between the two, and the fork server reaps it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.join()
        self.stdout.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.exitcode

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status; raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode


def _become(
    arguments: list[str],
    environment: dict[str, str],
    directory: Path,
    log: Path,
    is_spoken_to: bool,
    standard_input: Connection,
    standard_output: Connection,
) -> None:
    """In the forked process."""
    import torch

    from tests import preload

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(log, "ab") as errors:
        for target, source in enumerate((standard_input, standard_output if is_spoken_to else errors, errors)):
            os.dup2(source.fileno(), target)
    standard_input.close()
    standard_output.close()
    sys.stdin = os.fdopen(0)  # multiprocessing has closed the one before
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(preload.SET_ON_IMPORT | environment)
    if environment.get("TORCHDYNAMO_DISABLE") == "1":  # torch reads it where a function is decorated, and that is over
        torch.compiler.set_stance("force_eager")
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")
