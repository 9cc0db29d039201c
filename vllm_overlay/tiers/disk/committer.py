# SPDX-License-Identifier: Apache-2.0
"""Tells the catalogue, in order, of what was stored, and unlinks what is of no use."""

import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.tiers.disk.catalogue import BATCH_ROWS, Refusal
from vllm_overlay.tiers.disk.catalogue import Committed as Answer
from vllm_overlay.tiers.disk.messages import Committed, Discarded, Moved, ServedNamespace, Step, Stored, discarded
from vllm_overlay.tiers.disk.room import Room
from vllm_overlay.tiers.disk.site import Seat
from vllm_overlay.tiers.disk.unlinker import Unlinker

_log = RateLimitedLog(logging.getLogger(__name__))


class Committer:
    """Called in the bookkeeper's thread. Raises CatalogueError. The steps that are left are then tried again."""

    def __init__(self, seat: Seat, unlinker: Unlinker, room: Room, move: Callable[[ServedNamespace], None]) -> None:
        self._seat = seat
        self._unlinker = unlinker
        self._room = room
        self._move = move

    def carry_out(self, steps: deque[Step], stuck: list[Discarded], now: int) -> None:
        """Take away what is done, each step once; ``stuck`` has what could not be unlinked. Another thread may append
        to ``steps`` meanwhile. What is stored was used ``now``, in seconds since the epoch."""
        for step in tuple(stuck):
            if self._discard(step):
                stuck.remove(step)
        while steps:
            if stored := _leading_stores(steps):
                self._commit(stored, steps, now)
                continue
            match steps[0]:
                case Discarded() as step:
                    if not self._discard(step):
                        stuck.append(step)
                case Moved(served):
                    self._move(served)
            steps.popleft()

    def _commit(self, stored: Sequence[Stored], steps: deque[Step], now: int) -> None:
        """Once the catalogue has answered, these steps are done. What is left to do becomes new steps."""
        answers = self._ask(stored, now)
        left: list[Step] = []
        for step, answer in zip(stored, answers, strict=True):
            steps.popleft()
            own, object_id = step.item.file, step.served.namespace.own_id(step.item.planned.object_id)
            assert object_id is not None
            counts = answer.file if isinstance(answer, Answer) else None
            step.served.updates.append(Committed(object_id, own, counts))
            if counts != own:
                left.append(discarded(step))
                continue
            is_paid = isinstance(answer, Answer) and answer.is_paid
            (self._room.commit if is_paid else self._room.release)(step.item.num_bytes)
            step.served.holds.release(step.parents)
        steps.extendleft(reversed(left))

    def _ask(self, stored: Sequence[Stored], now: int) -> list[Answer | Refusal]:
        """What the catalogue says of each. A writer that has ended meanwhile takes its stores along."""
        own = [step for step in stored if step.item.file.writer == self._seat.writer]
        answers = dict(zip((step.item.file for step in own), self._answers(own, now), strict=True))
        return [answers.get(step.item.file, Refusal.NO_GRANT) for step in stored]

    def _answers(self, stored: Sequence[Stored], now: int) -> list[Answer | Refusal]:
        try:
            used = [(msgspec.structs.replace(step.item, last_use=now), step.replaces) for step in stored]
            return self._seat.catalogue.commit(self._seat.writer, used)
        except ValueError as error:  # an object that no row can hold must not keep the others
            if len(stored) > 1:
                return [answer for step in stored for answer in self._answers([step], now)]
            _log.warning("row", "disk tier: an object cannot be kept: %s", error)
            return [Refusal.NO_GRANT]

    def _discard(self, step: Discarded) -> bool:
        """Whether its files are gone, or named after all: a rebuild may have found them. If not, its bytes stay
        taken."""
        if not self._seat.catalogue.named([step.file]) and not self._unlinker.unlink(step.file, step.world_size):
            return False
        self._room.release(step.num_bytes)
        step.served.holds.release(step.parents)
        return True


def _leading_stores(steps: deque[Step]) -> list[Stored]:
    found = []
    for place in range(min(len(steps), BATCH_ROWS)):
        step = steps[place]
        if not isinstance(step, Stored):
            break
        found.append(step)
    return found
