# SPDX-License-Identifier: Apache-2.0
"""The oracle: does what vLLM's model runner does with each step, and knows of each token whether it is right.

The order within a step is the runner's (``gpu_model_runner.py``): zero new blocks, copy blocks, update the requests,
copy states to the blocks they go on in, load, forward, report. In a step with synchronous loads patch 0007 puts the
copy of states behind the load; without it the copy comes first.
"""

import inspect
import random
import sys
from dataclasses import dataclass, field

import torch
from vllm.model_executor.layers.mamba.checkpoint import (
    _gather_checkpoint_state_indices,
    compute_mamba_prefill_checkpoints,
)
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker import mamba_utils

from devtools.poison.connector import Load
from devtools.poison.memory import POISON, Memory, Prefixes

COPIES_AFTER_LOADS = "copy_later" in inspect.signature(mamba_utils.preprocess_mamba).parameters
"""Whether patch 0007 is in this vLLM."""
NUM_TOKENS = 6
"""Tokens of the model; prompts have others."""
POISONED_TOKEN = 10**6
"""What the model says when anything it has read is wrong."""


def right_token(prefix: int) -> int:
    return prefix * 2654435761 // 8 % NUM_TOKENS


@dataclass(slots=True)
class WorkerRequest:
    prompt: list[int]
    outputs: list[int]
    blocks: tuple[list[int], ...]
    num_computed: int = 0
    num_accepted: int = 1
    """What the last step has sampled. The running state lies so many blocks less one behind the step's own block."""
    num_rejected: int = 0
    """Drafts of the last step. With asynchronous scheduling the next one is planned as if there were none."""
    drafts: list[int] = field(default_factory=list)
    """For the next step, which is planned before they are known."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.outputs)


@dataclass(slots=True)
class StepResult:
    sampled: dict[str, list[int]]
    report: KVConnectorOutput = field(default_factory=KVConnectorOutput)
    num_loads: int = 0
    stored: list[tuple[int, int]] = field(default_factory=list)
    """The states that were offered for storing, and what they should be; none while a bad load is still to be told."""
    has_used_bad_load: bool = False
    """What is computed with it may be wrong: of a synchronous load, or of one that is told late."""


class Worker:
    def __init__(
        self,
        prefixes: Prefixes,
        block_size: int,
        num_state_groups: int,
        is_async: bool,
        reports_blocks: bool,
        tells_late: bool = False,
        window: int = 0,
        checkpoint_unit: int = 0,
        is_v2: bool = False,
    ) -> None:
        """``window``: tokens that each token of one more group attends to, itself among them; 0: no such group.
        ``checkpoint_unit``: the match unit where prefills keep checkpoints. ``is_v2``: it counts computed tokens
        itself, as the V2 model runner does, and hears of the scheduler's count with a request alone."""
        self._prefixes = prefixes
        self._size = block_size
        self._state_groups = range(1, 1 + num_state_groups)
        self._reach = {0: sys.maxsize} | ({1 + num_state_groups: window - 1} if window else {})
        """Of each group of attention: how many tokens before its own a token reads."""
        self._checkpoint_unit = checkpoint_unit
        self._is_async = is_async
        self._is_v2 = is_v2
        self._reports_blocks = reports_blocks
        self._tells_late = tells_late
        self._untold: dict[str, tuple[Load, set[int]]] = {}
        """Of asynchronous loads that ended as good ones: their bad blocks."""
        self.memory = Memory()
        self.trace: list[str] | None = None
        self._requests: dict[str, WorkerRequest] = {}
        self._batch: set[str] = set()
        self._state_index: dict[str, int] = {}
        self._loading: list[tuple[Load, int, bool]] = []
        """Asynchronous loads, the steps until they are done, and whether they have written."""

    def execute(self, step: SchedulerOutput) -> StepResult:
        for name in step.finished_req_ids:
            self._requests.pop(name, None)
            self._state_index.pop(name, None)
            self._untold.pop(name, None)
        for block in step.new_block_ids_to_zero or ():
            self.memory.clear(block)
        self.memory.copy([(pair.src_block_id, pair.dst_block_id) for pair in step.kv_cache_block_copies or ()])
        self._update_requests(step)
        result = StepResult({})
        orders = step.kv_connector_metadata
        loads = orders.loads if orders else []
        copies, is_sync = self._state_copies(step), step.has_sync_kv_loads
        if is_sync and COPIES_AFTER_LOADS:
            self._start(loads, result)
        self.memory.copy(copies)
        if is_sync and not COPIES_AFTER_LOADS:
            self._start(loads, result)
        for name, num_scheduled in step.num_scheduled_tokens.items():
            drafts = step.scheduled_spec_decode_tokens.get(name, [])
            if self._is_async:
                # A first step of one token is planned with drafts too. There are none: all are wrong.
                proposed, self._requests[name].drafts = self._requests[name].drafts, []
                drafts = (proposed or [NUM_TOKENS] * len(drafts))[: len(drafts)]
            result.sampled[name] = self._forward(self._requests[name], name, num_scheduled, drafts)
            if name in self._untold:
                result.has_used_bad_load = True
                self._report_failure(*self._untold.pop(name), result.report)
        if not is_sync:
            self._start(loads, result)
        self._advance_loads(result)
        if orders and not self._untold:
            chains = [(block, self._prefixes.chain(tokens)) for block, tokens in orders.offers]
            result.stored = [(self.memory.state(block), chain[-1]) for block, chain in chains]
        return result

    def _update_requests(self, step: SchedulerOutput) -> None:
        for new in step.scheduled_new_reqs:
            self._requests[new.req_id] = WorkerRequest(
                list(new.prefill_token_ids or new.prompt_token_ids or ()),
                [],
                tuple(list(ids) for ids in new.block_ids),
                new.num_computed_tokens,
            )
        cached = step.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            request = self._requests[name]
            if name not in self._batch:
                request.drafts = []
            if not self._is_v2:
                self._follow_scheduler(request, name, cached, i)
            if (new_blocks := cached.new_block_ids[i]) is not None:
                for ids, more in zip(request.blocks, new_blocks, strict=True):
                    ids.extend(more)
        self._batch = set(step.num_scheduled_tokens)

    def _follow_scheduler(self, request: WorkerRequest, name: str, cached: CachedRequestData, i: int) -> None:
        resumed = name in cached.resumed_req_ids
        request.num_computed = cached.num_computed_tokens[i]
        if self._is_async and not resumed and name in self._batch:
            request.num_computed -= request.num_rejected
        num_outputs = cached.num_output_tokens[i]
        del request.outputs[num_outputs:]
        if self._is_async and num_outputs and (resumed or name not in self._batch):
            request.outputs = list(cached.all_token_ids[name][-num_outputs:])
        if resumed:
            request.num_accepted = 1
            request.blocks = tuple([] for _ in request.blocks)

    def _state_copies(self, step: SchedulerOutput) -> list[tuple[int, int]]:
        """``preprocess_mamba``: the running state goes to the block in which the step ends."""
        if not self._state_groups:
            return []
        for name in (*(step.preempted_req_ids or ()), *step.scheduled_cached_reqs.resumed_req_ids):
            self._state_index.pop(name, None)
        pairs = []
        for name, num_scheduled in step.num_scheduled_tokens.items():
            request = self._requests[name]
            before = self._state_index.get(name, (request.num_computed - 1) // self._size)
            after = cdiv(request.num_computed + num_scheduled, self._size) - 1
            self._state_index[name] = after
            if before not in (-1, after):
                before += request.num_accepted - 1
                pairs += [(request.blocks[group][before], request.blocks[group][after]) for group in self._state_groups]
                request.num_accepted = 1
        return pairs

    def propose(self, drafts: dict[str, list[int]]) -> None:
        """For the next step, where that is planned before they are known."""
        for name, of_request in drafts.items():
            self._requests[name].drafts = of_request

    def next_tokens(self, name: str, number: int) -> list[int]:
        """What the model will say, if nothing goes wrong."""
        request = self._requests[name]
        tokens = [*request.prompt, *request.outputs]
        for _ in range(number):
            tokens.append(right_token(self._prefixes.chain(tokens)[-1]))
        return tokens[request.num_tokens :]

    def _forward(self, request: WorkerRequest, name: str, num_scheduled: int, drafts: list[int]) -> list[int]:
        """Computes; what is wrong in what it reads is in all that it writes."""
        start, end = request.num_computed, request.num_computed + num_scheduled
        known = end - len(drafts)
        chain = self._prefixes.chain([*[*request.prompt, *request.outputs][:known], *drafts])
        assert len(chain) == end + 1, f"{name}: the runner has {len(chain) - 1} tokens and is to compute {end}"
        wrong = self._wrong_reads(request, chain, start, end)
        if wrong:
            self._note(f"  {name} reads {wrong}")
        for position in range(start, end):
            for group in self._reach:
                block = request.blocks[group][position // self._size]
                assert block, f"{name}: no block of group {group} to write token {position} to"
                self.memory.write_slot(block, position % self._size, POISON if wrong else chain[position + 1])
        index = cdiv(end, self._size) - 1
        for group in self._state_groups:
            for more in range(len(drafts) + 1):
                block = request.blocks[group][index + more]
                assert block, f"{name}: no block to write the state after {known + more} to"
                self.memory.write_state(block, POISON if wrong else chain[known + more])
        if self._checkpoint_unit:
            self._keep_checkpoint(request, chain, start, wrong)
        request.num_computed, request.num_accepted, request.num_rejected = end, 1, 0
        if known < request.num_tokens:
            return []
        sampled = [POISONED_TOKEN if wrong else right_token(chain[known])]
        while len(sampled) <= len(drafts) and drafts[len(sampled) - 1] == sampled[-1]:
            sampled.append(right_token(chain[known + len(sampled)]))
        request.outputs += sampled
        request.num_accepted, request.num_rejected = len(sampled), len(drafts) + 1 - len(sampled)
        request.num_computed -= request.num_rejected
        self._keep_boundary(request, known, index)
        return sampled

    def _keep_checkpoint(self, request: WorkerRequest, chain: list[int], start: int, wrong: str) -> None:
        """``MambaPrefillCheckpointBuilder``: the state at the last match unit goes to the block before the last."""
        (offset,), (column,) = compute_mamba_prefill_checkpoints(
            [len(chain) - 1],
            [len(chain) - 1 - start],
            hash_block_size=self._checkpoint_unit,
            mamba_block_size=self._size,
            checkpoint_alignment=1,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=self._checkpoint_unit,
        )
        for group in self._state_groups if offset else ():
            table, row = torch.tensor([request.blocks[group]]), torch.tensor([0])
            block = _gather_checkpoint_state_indices(table, row, torch.tensor([column])).item()
            if block:
                self.memory.write_state(int(block), POISON if wrong else chain[start + offset])

    def _keep_boundary(self, request: WorkerRequest, known: int, index: int) -> None:
        """``postprocess_mamba``: the state at a block's end that accepted drafts have passed goes to that block."""
        boundary = (known + request.num_accepted - 1) // self._size * self._size
        if boundary < known:
            return
        source, target = index + boundary - known, boundary // self._size - 1
        for group in self._state_groups:
            self.memory.copy([(request.blocks[group][source], request.blocks[group][target])])
        if index == target:
            request.num_accepted = 1

    def _wrong_reads(self, request: WorkerRequest, chain: list[int], start: int, end: int) -> str:
        for group, reach in self._reach.items():
            for position in range(max(start - reach, 0), start):
                block = request.blocks[group][position // self._size]
                if self.memory.slot(block, position % self._size) != chain[position + 1]:
                    return f"token {position} of attention in block {block} of group {group}"
        for group in self._state_groups if start else ():
            block = request.blocks[group][cdiv(end, self._size) - 2 + request.num_accepted]
            if self.memory.state(block) != chain[start]:
                return f"the state after {start} in block {block} of group {group}"
        return "" if POISONED_TOKEN not in request.outputs[: max(end - len(request.prompt), 0)] else "a wrong token"

    def _start(self, loads: list[Load], result: StepResult) -> None:
        for load in loads:
            dice = random.Random(load.dice)
            self._note(" ", load)
            if load.is_async:
                writes_now = dice.random() < 0.5
                if writes_now:
                    self._write(load)
                self._loading.append((load, dice.randint(0, 3), writes_now))
            else:
                result.num_loads += 1
                bad = self._write(load)
                result.has_used_bad_load |= bool(bad)
                self._report(load, bad, result.report)

    def _advance_loads(self, result: StepResult) -> None:
        remaining = []
        for load, num_steps, has_written in self._loading:
            result.num_loads += 1
            if num_steps:
                remaining.append((load, num_steps - 1, has_written))
                continue
            bad = self._bad_blocks(load) if has_written else self._write(load)
            self._report(load, bad, result.report)
        self._loading = remaining

    def _bad_blocks(self, load: Load) -> set[int]:
        """The blocks that this load does not fill; the same at each call."""
        if not load.fails:
            return set()
        first, last = load.start // self._size, cdiv(load.end, self._size)
        blocks = {block for group in self._reach for block in load.blocks[group][first:last]}
        blocks |= {load.blocks[group][(load.end - 1) // self._size] for group in self._state_groups}
        blocks.discard(0)
        if not self._reports_blocks or self._fills_nothing(load):
            return blocks
        return self._some_of(blocks, load)

    def _fills_nothing(self, load: Load) -> bool:
        """With several groups a connector may give up at the first bad block, and report no other one."""
        return len(self._reach) + len(self._state_groups) > 1 and load.dice % 2 == 0

    def _some_of(self, blocks: set[int], load: Load) -> set[int]:
        dice = random.Random(load.dice)
        return set(dice.sample(sorted(blocks), dice.randint(1, len(blocks))))

    def _write(self, load: Load) -> set[int]:
        """Writes the right content but for the blocks that fail, which get poison or keep what was there."""
        chain = self._prefixes.chain(load.tokens)
        bad = self._bad_blocks(load)
        writes_poison = random.Random(load.dice + 1).random() < 0.5
        for position in range(load.start, load.end):
            for group in self._reach:
                block = load.blocks[group][position // self._size]
                if block and (block not in bad or writes_poison):
                    self.memory.write_slot(
                        block, position % self._size, POISON if block in bad else chain[position + 1]
                    )
        for group in self._state_groups:
            block = load.blocks[group][(load.end - 1) // self._size]
            if block and (block not in bad or writes_poison):
                self.memory.write_state(block, POISON if block in bad else chain[load.end])
        return bad

    def _report(self, load: Load, bad: set[int], report: KVConnectorOutput) -> None:
        dice = random.Random(load.dice + 2)
        if load.is_async or (bad and not self._reports_blocks and dice.random() < 0.5):
            report.finished_recving = (report.finished_recving or set()) | {load.request_id}
        if bad and load.is_async and self._tells_late:
            self._untold[load.request_id] = load, bad
        elif bad:
            self._report_failure(load, bad, report)

    def _report_failure(self, load: Load, bad: set[int], report: KVConnectorOutput) -> None:
        if self._reports_blocks:
            report.invalid_block_ids |= self._some_of(bad, load) if self._fills_nothing(load) else bad
        else:
            report.failed_recving |= {load.request_id}

    def _note(self, *said: object) -> None:
        if self.trace is not None:
            self.trace.append(" ".join(map(str, said)))
