# SPDX-License-Identifier: Apache-2.0
"""What a failed load does to its request. vLLM has one policy for an engine; here is whose word counts. Pure.

vLLM's own default is to fail the request. A ``KVTransferConfig`` does not tell that default from the same value set by
an operator. So ``"fail"`` at the top says nothing; everywhere else it is an operator's word.
"""

from collections.abc import Mapping
from dataclasses import dataclass

RECOMPUTE, FAIL = "recompute", "fail"


@dataclass(slots=True, frozen=True)
class LoadFailurePolicy:
    """``value`` is one of vLLM's ``kv_load_failure_policy``; ``reason`` says who wanted it, for the log."""

    value: str
    reason: str


def load_failure_policy(own: str | None, at_top: str, childrens: Mapping[str, str]) -> LoadFailurePolicy:
    """The first of: the MultiConnector's own setting, ``recompute`` at the top, ``fail`` of a child, ``recompute``.

    ``own``: the setting, or None where it is not given. ``at_top``: ``kv_load_failure_policy`` beside ``kv_connector``.
    ``childrens``: child name -> what its own entry says, of those whose entry says something.
    """
    if own is not None:
        return LoadFailurePolicy(own, "load_failure_policy of the MultiConnector says so")
    if at_top == RECOMPUTE:
        return LoadFailurePolicy(RECOMPUTE, "kv_load_failure_policy of --kv-transfer-config says so")
    if failing := [name for name, policy in childrens.items() if policy == FAIL]:
        return LoadFailurePolicy(FAIL, f"connector {', '.join(failing)} says so")
    return LoadFailurePolicy(
        RECOMPUTE,
        'that is the default; "fail" beside kv_connector cannot be told from vLLM\'s own default, so set '
        "load_failure_policy of the MultiConnector to change it",
    )
