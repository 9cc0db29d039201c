# SPDX-License-Identifier: Apache-2.0
"""A server whose processes are forked from one that has imported vLLM: three times seven seconds of a core less.

Demo, quickstart and the README's commands are run as users run them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tests.python_path import REPOSITORY, python_path
from tests.warm import WarmProcess
from tools.process_group import ProcessGroup
from tools.server import Server


class _WarmGroup(ProcessGroup):
    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> WarmProcess:
        _, *arguments = command
        return WarmProcess(arguments, environment, REPOSITORY, self.log_path, is_spoken_to=False)


class WarmServer(Server):
    """As ``tools.server.Server``."""

    GROUP: ClassVar[type[ProcessGroup]] = _WarmGroup

    def __init__(self, *arguments: Any, environment: Mapping[str, str] | None = None, **named: Any) -> None:
        super().__init__(*arguments, environment={"PYTHONPATH": python_path(), **(environment or {})}, **named)
