# SPDX-License-Identifier: Apache-2.0
"""What ``fsck`` says: findings, and the report that they make."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class What(StrEnum):
    """What a finding is about."""

    HEADER = "header"
    """The header does not verify, or is that of another object. Or the file is not a regular one."""
    SIZE = "size"
    CHECKSUM = "checksum"
    UNREADABLE = "unreadable"
    PLACE = "place"
    """It has an object's name and does not lie where that object belongs."""
    MODE = "mode"
    OWNER = "owner"
    INCOMPLETE = "incomplete"
    """Not every rank has a file, or they do not say the same."""
    UNREACHABLE = "unreachable"
    """An object that it depends on is not there."""
    LEFTOVER = "leftover"
    """A temporary that nobody will finish."""
    MARKER = "marker"
    """The marker is of an earlier version, or does not verify."""
    CATALOGUE = "catalogue"
    """The catalogue is missing or damaged, or it and the files do not say the same."""
    KEY = "key"
    """A namespace whose checksums need a key that is not the given one: nothing of it was verified."""
    VERSION = "version"
    """A namespace whose objects have another version of the disk format: nothing of it was verified."""
    MANIFEST = "manifest"
    """A namespace.json that cannot be read."""
    LEARNED = "learned"
    """A learned.json that cannot be used: eviction learns from the start."""
    STRANGER = "stranger"
    """Not ours: never opened, never changed. A problem only in the place of a member's lock."""


@dataclass(slots=True)
class Finding:
    """``path`` is relative to the root. A finding that is no problem is a note: it costs nothing and needs no
    repair."""

    path: str
    what: What
    detail: str = ""
    is_problem: bool = True
    is_repaired: bool = False


@dataclass(slots=True)
class Report:
    """Files and bytes are those of objects; an object counts when all its ranks' files verify and it can be reached."""

    num_namespaces: int = 0
    num_files: int = 0
    num_bytes: int = 0
    num_objects: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_problem]

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong, or nothing is any more."""
        return all(finding.is_repaired for finding in self.problems)


class Findings:
    """Records findings while ``fsck`` runs and, where it may, repairs each at once."""

    def __init__(self, root: str, repair: bool) -> None:
        self.root = root
        self.repair = repair
        self.report = Report()
        self.has_unread = False
        """Whether something could not be read. Then nobody knows what is missing."""

    def note(self, path: str, what: What, detail: str) -> None:
        self.report.findings.append(Finding(self._relative(path), what, detail, is_problem=False))

    def problem(self, path: str, what: What, detail: str, repair: Callable[[], bool] = lambda: False) -> None:
        """``repair`` returns whether it has repaired; it may raise OSError."""
        is_repaired = False
        if self.repair:
            with contextlib.suppress(OSError):
                is_repaired = repair()
        self.report.findings.append(Finding(self._relative(path), what, detail, is_repaired=is_repaired))

    def unread(self, path: str, detail: str) -> None:
        """A problem that has no repair but to try again."""
        self.has_unread = True
        self.problem(path, What.UNREADABLE, detail)

    def _relative(self, path: str) -> str:
        return os.path.relpath(os.path.join(self.root, path), self.root)
