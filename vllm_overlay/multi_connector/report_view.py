# SPDX-License-Identifier: Apache-2.0
"""What one child sees of a step's reports, and what it made of them.

vLLM lets a connector change the reports in ``update_connector_output`` before the scheduler acts on them. MoRIIO does:
it takes out what it does not want freed yet, and puts in what it has given up. With several children each gets a copy,
so that a change of one is no change of the others.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_overlay.multi_connector import validation

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput


@dataclass(slots=True, frozen=True)
class Reports:
    """The reports of one step, of all children. All ids are request ids."""

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.sent or self.received or self.failed)

    @classmethod
    def of(cls, output: "KVConnectorOutput") -> "Reports":
        """What ``output`` says. Raises TypeError if those are no request ids."""
        reported = output.finished_sending, output.finished_recving, output.failed_recving
        if not any(reported):
            return _NO_REPORTS
        return cls(*(frozenset(validation.request_ids(ids)) for ids in reported))


_NO_REPORTS = Reports()
"""What most steps have."""


@dataclass(slots=True, frozen=True)
class Changes:
    """What one child's hook changed in its copy."""

    sent_added: frozenset[str] = frozenset()
    sent_removed: frozenset[str] = frozenset()
    received_added: frozenset[str] = frozenset()
    received_removed: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.sent_added or self.sent_removed or self.received_added or self.received_removed)


_NO_CHANGES = Changes()


class ReportView:
    """One child's copy of a step's ``KVConnectorOutput``."""

    def __init__(self, output: "KVConnectorOutput", shown: Reports, **parts: Any) -> None:
        """``shown``: the reports that the child sees; ``parts``: other fields that it gets instead of ``output``'s."""
        self._shown = shown
        # Every step makes one for each child, and copy.copy or dataclasses.replace would be most of its time.
        self.output = object.__new__(type(output))
        self.output.__dict__.update(
            {
                **vars(output),
                "finished_sending": _copy(shown.sent),
                "finished_recving": _copy(shown.received),
                "failed_recving": set(shown.failed),
                **parts,
            }
        )

    def changes(self, answer: object = None) -> Changes:
        """What the child changed. Raises TypeError if it left something else than request ids.

        ``answer``: what the hook returned, which means nothing.
        """
        shown, left = self._shown, Reports.of(self.output)
        if left == shown:
            return _NO_CHANGES
        return Changes(
            sent_added=left.sent - shown.sent,
            sent_removed=shown.sent - left.sent,
            received_added=left.received - shown.received,
            received_removed=shown.received - left.received,
        )


def _copy(request_ids: Collection[str]) -> set[str] | None:
    """As vLLM has it: None for nothing."""
    return set(request_ids) or None
