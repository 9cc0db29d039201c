# SPDX-License-Identifier: Apache-2.0
"""Files as numbers: the tickets that the index keeps of its entries."""

from vllm_overlay.tiers.disk.catalogue import File

_BITS = 40
"""Of a file's number. The rest of a ticket stands for its writer."""


class FileTickets:
    """A ticket for each file, the same one each time. Called from the scheduler's thread."""

    def __init__(self) -> None:
        self._writers: list[str] = []
        self._places: dict[str, int] = {}

    def ticket(self, file: File) -> int:
        place = self._places.get(file.writer)
        if place is None:
            place = self._places[file.writer] = len(self._writers)
            self._writers.append(file.writer)
        return place << _BITS | file.number

    def file(self, ticket: int) -> File:
        return File(self._writers[ticket >> _BITS], ticket & ((1 << _BITS) - 1))
