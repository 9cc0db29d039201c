# SPDX-License-Identifier: Apache-2.0
"""What tickets say of files: to workers, and to the index, which keeps of each entry a number."""

import msgspec

from vllm_overlay.tiers.disk.catalogue import File

_BITS = 40
"""Of a file's number. The rest of a ticket stands for its writer."""


class DiskPart(msgspec.Struct, frozen=True, gc=False):
    """What the manager tells its workers beside the object: the file of a store or a load, and its namespace."""

    file: File
    fingerprint: str
    is_private: bool = False


class FileTickets:
    """A ticket for each file, the same one each time: above zero for what this engine has stored, and for nothing else.

    Called from the scheduler's thread.
    """

    def __init__(self) -> None:
        self._own: set[str] = set()
        self._writers: list[str] = []
        self._places: dict[str, int] = {}

    def of_store(self, file: File) -> int:
        """The ticket of a file that this engine, whose writer nobody else is, begins to store."""
        self._own.add(file.writer)
        return self.ticket(file)

    def ticket(self, file: File) -> int:
        place = self._places.get(file.writer)
        if place is None:
            place = self._places[file.writer] = len(self._writers)
            self._writers.append(file.writer)
        ticket = place << _BITS | file.number
        return ticket if file.writer in self._own else -ticket

    def file(self, ticket: int) -> File:
        ticket = abs(ticket)
        return File(self._writers[ticket >> _BITS], ticket & ((1 << _BITS) - 1))
