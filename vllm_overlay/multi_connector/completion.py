# SPDX-License-Identifier: Apache-2.0
"""What one rank's children still have to report. Sets per (request, child), never counts.

A rank reports a request to the scheduler once all of its children have. vLLM then counts the ranks. The scheduler's
own account is in ``outstanding.py``.
"""

from collections.abc import Collection

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from vllm_overlay.multi_connector.metadata import NULL_BLOCK, Load


class Completions:
    """One rank's open loads and saves. All ids are request ids, all children indexes.

    A save may be reported *early*: while its request lives, or when the request is finished and this rank has not been
    told so yet. Such a report is kept until the request is finished, and counts then.
    """

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._latest_loads: dict[str, Load] = {}
        """Also those that have ended, while their requests live."""
        self._failed_early: set[str] = set()
        self._saves: dict[str, set[int]] = {}
        self._living: set[str] = set()
        self._sent_early: dict[str, set[int]] = {}
        self._done = KVConnectorTransferResults()
        self._invalid_blocks: set[int] = set()

    def owes(self, child: int) -> bool:
        """Whether ``child`` still has something to report."""
        return any(load.child == child for load in self._loads.values()) or any(
            child in owed for owed in self._saves.values()
        )

    def expect_load(self, request_id: str, load: Load) -> None:
        """A load was handed to its child with this step's metadata. After ``requests_changed``."""
        self._loads[request_id] = self._latest_loads[request_id] = load

    def refuse_load(self, request_id: str, load: Load) -> None:
        """A load that its child never saw, so nothing writes: it fails at once."""
        self.expect_load(request_id, load)
        self._fail(request_id)

    def expect_saves(self, request_id: str, children: Collection[int]) -> None:
        """A request is finished. These children hold its blocks until they report, or have reported already."""
        early = self._sent_early.pop(request_id, set())
        self._saves.setdefault(request_id, set()).update(set(children) - early)
        self._end_if_sent(request_id)

    def requests_changed(self, arrived: Collection[str], departed: Collection[str]) -> None:
        """Requests that have come, and that have finished, since the last step. After ``expect_saves``."""
        self._living.difference_update(departed)
        for request_id in departed:
            self._sent_early.pop(request_id, None)
            self._latest_loads.pop(request_id, None)
        self._living.update(arrived)

    def release(self, request_id: str) -> None:
        """The request's blocks are free: another rank has reported it for all."""
        self._saves.pop(request_id, None)

    def received(self, child: int, finished: Collection[str], failed: Collection[str]) -> int:
        """Takes one child's finished and failed loads. Returns how many reports were not the child's to make.

        A synchronous load that its child calls failed is told by its blocks, and needs no report when it is good.
        """
        ignored = 0
        own = {request_id: load for request_id, load in self._loads.items() if load.child == child}
        for request_id in own.keys() & failed:
            if own[request_id].is_synchronous:
                self._fail(request_id)
            else:
                self._failed_early.add(request_id)
        for request_id in finished:
            if request_id in own and not own[request_id].is_synchronous:
                self._end(request_id)
            else:
                ignored += 1
        return ignored

    def sent(self, child: int, finished: Collection[str]) -> int:
        """Takes one child's finished saves. Returns how many reports were not the child's to make."""
        ignored = 0
        for request_id in finished:
            if child in self._saves.get(request_id, ()):
                self._saves[request_id].discard(child)
                self._end_if_sent(request_id)
            elif request_id in self._living:
                self._sent_early.setdefault(request_id, set()).add(child)
            else:
                ignored += 1
        return ignored

    def _end_if_sent(self, request_id: str) -> None:
        if not self._saves[request_id]:
            del self._saves[request_id]
            self._done.finished_sending.add(request_id)

    def load_errors(self, child: int, blocks: Collection[int]) -> None:
        """Takes the blocks that one child calls bad, as far as it was told to load them. Raises ValueError for others.

        Its load may have ended: the scheduler finds the requests that compute with these blocks (patch 0006).
        """
        loads = (*self._loads.values(), *self._latest_loads.values()) if blocks else ()
        own = {block for load in loads if load.child == child for block in load.blocks}
        self._invalid_blocks |= own.intersection(blocks)
        if foreign := set(blocks) - own - {NULL_BLOCK}:
            raise ValueError(f"it calls blocks bad that it was not told to load: {sorted(foreign)[:5]}")

    def fail_synchronous(self, child: int) -> None:
        """Fails this step's synchronous loads of ``child``: the forward pass has used what they left."""
        for request_id, load in list(self._loads.items()):
            if load.child == child and load.is_synchronous:
                self._fail(request_id)

    def abandon(self, child: int) -> None:
        """Ends all that ``child`` owes. Only once nothing of it touches a block any more."""
        for request_id, load in list(self._loads.items()):
            if load.child == child:
                self._fail(request_id)
        self.sent(child, [request_id for request_id, owed in self._saves.items() if child in owed])

    def _fail(self, request_id: str) -> None:
        if (load := self._loads[request_id]).is_synchronous:
            del self._loads[request_id]
            self._invalid_blocks.update(load.blocks)
        else:
            self._failed_early.add(request_id)
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        """An asynchronous load is reported."""
        del self._loads[request_id]
        self._done.finished_recving.add(request_id)
        if request_id in self._failed_early:
            self._failed_early.discard(request_id)  # a later load of it is another
            self._done.failed_recving.add(request_id)

    def take(self) -> KVConnectorTransferResults:
        """This step's reports. Synchronous loads end here: the forward pass has used them."""
        done, self._done = self._done, KVConnectorTransferResults()
        self._loads = {request_id: load for request_id, load in self._loads.items() if not load.is_synchronous}
        return done

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of loads that have failed since this was last called."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks
