# SPDX-License-Identifier: Apache-2.0
"""What one rank's children still have to report. Sets per (request, child), never counts.

A rank reports a request to the scheduler once all of its children have. vLLM then counts the ranks. The scheduler's
own account is in ``outstanding.py``.
"""

from collections.abc import Collection

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from vllm_overlay.multi_connector.metadata import Load


class Completions:
    """One rank's open loads and saves. All ids are request ids, all children indexes.

    A save may be reported *early*: while its request lives, or when the request is finished and this rank has not been
    told so yet. Such a report is kept until the request is finished, and counts then.
    """

    def __init__(self) -> None:
        self._loads: dict[str, int] = {}
        self._saves: dict[str, set[int]] = {}
        self._synchronous: dict[str, Load] = {}
        self._failed_early: set[str] = set()
        self._living: set[str] = set()
        self._sent_early: dict[str, set[int]] = {}
        self._done = KVConnectorTransferResults()
        self._invalid_blocks: set[int] = set()

    def owes(self, child: int) -> bool:
        """Whether ``child`` still has something to report."""
        return (
            child in self._loads.values()
            or any(child in owed for owed in self._saves.values())
            or any(load.child == child for load in self._synchronous.values())
        )

    def expect_load(self, request_id: str, load: Load) -> None:
        """A load was handed to its child with this step's metadata."""
        if load.synchronous_blocks is None:
            self._loads[request_id] = load.child
            self._failed_early.discard(request_id)
        else:
            self._synchronous[request_id] = load

    def refuse_load(self, request_id: str, load: Load) -> None:
        """A load that its child never saw, so nothing writes: it fails at once."""
        self.expect_load(request_id, load)
        self._fail(request_id, load)

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
        self._living.update(arrived)

    def release(self, request_id: str) -> None:
        """The request's blocks are free: another rank has reported it for all."""
        self._saves.pop(request_id, None)

    def received(self, child: int, finished: Collection[str], failed: Collection[str]) -> int:
        """Takes one child's finished and failed loads. Returns how many reports were not the child's to make.

        A synchronous load that its child calls failed is told by its blocks, and needs no report when it is good.
        """
        ignored = 0
        for request_id in failed:
            if self._loads.get(request_id) == child:
                self._failed_early.add(request_id)
            elif (load := self._synchronous.get(request_id)) is not None and load.child == child:
                self._fail(request_id, load)
        for request_id in finished:
            if self._loads.get(request_id) != child:
                ignored += 1
                continue
            del self._loads[request_id]
            self._done.finished_recving.add(request_id)
            if request_id in self._failed_early:
                self._failed_early.discard(request_id)
                self._done.failed_recving.add(request_id)
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

    def load_errors(self, blocks: Collection[int]) -> None:
        """Blocks that a child says are bad, of a load that is open or of a request that computes with them already:
        the scheduler maps them to requests (patch 0006)."""
        self._invalid_blocks.update(blocks)

    def fail_synchronous(self, child: int) -> None:
        """Fails this step's synchronous loads of ``child``: the forward pass has used what they left."""
        for request_id, load in [item for item in self._synchronous.items() if item[1].child == child]:
            self._fail(request_id, load)

    def abandon(self, child: int) -> None:
        """Ends all that ``child`` owes. Only once nothing of it touches a block any more."""
        for request_id in [request_id for request_id, owner in self._loads.items() if owner == child]:
            self._fail(request_id, Load(child))
        self.fail_synchronous(child)
        self.sent(child, [request_id for request_id, owed in self._saves.items() if child in owed])

    def _fail(self, request_id: str, load: Load) -> None:
        if load.synchronous_blocks is not None:
            del self._synchronous[request_id]
            self._invalid_blocks.update(load.synchronous_blocks)
            return
        del self._loads[request_id]
        self._failed_early.discard(request_id)
        self._done.finished_recving.add(request_id)
        self._done.failed_recving.add(request_id)

    def take(self) -> KVConnectorTransferResults:
        """This step's reports. Synchronous loads end here: the forward pass has used them."""
        done, self._done = self._done, KVConnectorTransferResults()
        self._synchronous.clear()
        return done

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of loads that have failed since this was last called."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks
