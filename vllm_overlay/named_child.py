# SPDX-License-Identifier: Apache-2.0
"""What a connector may say of itself as a child of a MultiConnector. Others are named by their class, and are called in
every step."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults

Hook = TypeVar("Hook", bound=Callable[..., Any])


def empty_hook(hook: Hook) -> Hook:
    """Marks a method that does nothing and answers nothing: a MultiConnector need not call it."""
    hook.is_empty_hook = True  # type: ignore[attr-defined]
    return hook


class QuietStep(KVConnectorMetadata):  # type: ignore[misc, unused-ignore]
    """A scheduler's half has nothing for its workers to do in this step, and no hook of theirs need be called.

    But for those that report: see ``QuietResults``.
    """


class QuietResults(KVConnectorTransferResults):  # type: ignore[misc, unused-ignore]
    """A worker's half has nothing under way and nothing to report, until its scheduler's half has work for it."""


class NamedChild:
    """A connector class that has settings ``name`` and ``load_failure_policy`` in its ``kv_connector_extra_config``.

    A MultiConnector decides both and writes them there. So the child's own metrics carry the name that the
    MultiConnector's carry. The methods are called in every process, before an instance is built.
    """

    reads_while_looking = False
    """Whether an instance that answers a lookup with None may be reading what it will offer."""

    @classmethod
    @abstractmethod
    def child_name(cls, extra_config: Mapping[str, Any]) -> str | None:
        """The name of a child that was given none, before it is made unique; None: its class's. Must not raise."""

    @classmethod
    @abstractmethod
    def check_child(cls, extra_config: Mapping[str, Any]) -> dict[str, str]:
        """Checks the settings as far as they can be checked now; raises ConfigError.

        Returns what no other child of the same MultiConnector may have: setting -> value, two of them compared as they
        are.
        """

    @classmethod
    @abstractmethod
    def prior_load_weight(cls, extra_config: Mapping[str, Any]) -> float:
        """What ``"load_weight": "auto"`` is until it is measured; below 1. Called after ``check_child``."""
