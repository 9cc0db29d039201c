# SPDX-License-Identifier: Apache-2.0
"""One seed: random requests with shared prefixes, a random scheduler, random failures, and whether all went well."""

import random
import traceback
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.config import KVTransferConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from devtools.poison.connector import PATH, Habits, PoisonConnector
from devtools.poison.memory import EMPTY, Prefixes
from devtools.poison.worker import NUM_TOKENS, POISONED_TOKEN, StepResult, Worker, right_token
from devtools.scheduler_lab import LabSettings, make_request, make_scheduler, runner_output

BLOCK = 8
MAX_CONTEXT = 128
LONGEST_TURN = 10 * BLOCK
"""Of a request that goes on from an answer, with its own."""
MOST_IDLE_STEPS = 60
"""Without a token computed, a load done or a request ended, this many steps are a hang."""
MOST_STEPS = 3000
_CONTAINERS = (dict, set, list, deque)


@dataclass(frozen=True, slots=True)
class Column:
    num_state_groups: int
    is_async: bool
    kind: str
    """"late": asynchronous loads end as good ones; what is bad is told with the first step that uses them. "drafts":
    steps verify one to five drafts, of which none, some or all are right. With both and "aborts" some requests abort.
    With "few" there are few blocks. With "drafts", "priorities" and "window" there are, too, and answers are long.
    "priorities": a request takes the blocks of a less urgent one. "window": one more group attends to two blocks.
    "checkpoints": a prompt's last pass also keeps the state at its last match unit. Some steps verify a draft."""
    below_block: bool
    """The match unit is smaller than the block."""
    is_v2: bool = False
    """With the V2 model runner."""

    @property
    def name(self) -> str:
        return "-".join(
            (
                "hybrid" if self.num_state_groups else "attention",
                "async" if self.is_async else "sync",
                self.kind,
                "below" if self.below_block else "block",
                *(["V2"] if self.is_v2 else []),
            )
        )


@dataclass(slots=True)
class Plan:
    settings: LabSettings
    habits: Habits
    requests: list[Request]
    arrivals: list[int]
    """The step before which each request comes."""
    share_of_aborts: float
    share_of_resets: float
    recomputes: bool


@dataclass(slots=True)
class Verdict:
    """``problem`` is empty when all went well."""

    problem: str = ""
    num_steps: int = 0
    num_failed_loads: int = 0
    num_errors: int = 0
    """Requests ended under the policy "fail"."""
    trace: list[str] = field(default_factory=list)


class Wrong(Exception):
    """What a seed must not show."""


def make_plan(seed: int, column: Column, may_fail: bool) -> Plan:
    dice = random.Random(f"{seed} {column.name}")
    unit = dice.choice((1, 2, 4)) if column.below_block else BLOCK
    num_groups = dice.choice((1, 2)) if column.num_state_groups else 0
    requests_tokens = _prompts(dice, unit)
    has_priorities, has_window = column.kind == "priorities", column.kind == "window"
    has_long_answers = column.kind in ("drafts", "priorities", "window")
    if has_long_answers:
        lengths = [dice.randint(BLOCK, 3 * BLOCK) for _ in requests_tokens]
    else:
        lengths = [dice.choice((1, 2, 3, dice.randint(1, 2 * BLOCK))) for _ in requests_tokens]
    longest = max(len(tokens) + length for tokens, length in zip(requests_tokens, lengths, strict=True))
    has_few_blocks = has_long_answers or column.kind == "few"
    num_drafts = 0
    if column.kind == "drafts":
        num_drafts = dice.randint(1, 5)
    elif column.kind == "checkpoints" and not column.is_async:
        num_drafts = dice.choice((0, 1))
    if num_drafts:
        longest = max(longest, LONGEST_TURN)
    alone = cdiv(longest + num_drafts, BLOCK) * (1 + has_window) + (5 + num_drafts) * num_groups + 3
    recomputes = dice.random() < 0.75
    habits = Habits(
        dice=random.Random(dice.getrandbits(64)),
        unit=unit,
        share_of_hits=dice.choice((0.5, 0.8, 1.0)),
        share_of_failures=dice.choice((0.2, 0.5, 0.8)) if may_fail else 0.0,
        share_of_async=dice.choice((0.7, 1.0) if column.kind == "late" else (0.0, 0.0, 0.3, 1.0)),
        share_of_aligned=dice.choice((0.3, 1.0)),
        share_of_undecided=dice.choice((0.0, 0.1)),
        reports_blocks=dice.random() < 0.5,
        keeps_delivery=dice.random() < 0.5,
        completes_attention=dice.random() < 0.5 and not has_window,
    )
    settings = LabSettings(
        block_size=BLOCK,
        match_unit=unit,
        budget=dice.choice((2 * BLOCK, 3 * BLOCK + 3, 6 * BLOCK, 20 * BLOCK)),
        num_blocks=alone + (dice.randint(0, alone // 2) if has_few_blocks else 8 * alone),
        num_state_groups=num_groups,
        has_window=has_window,
        keeps_checkpoints=column.kind == "checkpoints",
        max_requests=dice.randint(2, 8),
        max_context=MAX_CONTEXT,
        is_asynchronous=column.is_async,
        is_v2=column.is_v2,
        retention_interval=dice.choice((0, None)),
        policy="priority" if has_priorities else "fcfs",
        longest_prefill=dice.choice((2, 3)) * BLOCK if has_priorities else 0,
        num_drafts=num_drafts,
        kv_transfer_config=KVTransferConfig(
            kv_connector="PoisonConnector",
            kv_connector_module_path=PATH,
            kv_role=dice.choice(("kv_both", "kv_both", "kv_producer")),
            kv_load_failure_policy="recompute" if recomputes else "fail",
        ),
    )
    arrivals = [0]
    for _ in requests_tokens:
        arrivals.append(arrivals[-1] + dice.choice((0, 0, 0, 1, 2, 5)))
    requests = [
        make_request(f"r{i}", tokens, length, settings, priority=dice.randrange(3) if has_priorities else 0)
        for i, (tokens, length) in enumerate(zip(requests_tokens, lengths, strict=True))
    ]
    return Plan(
        settings=settings,
        habits=habits,
        requests=requests,
        arrivals=arrivals,
        share_of_aborts=0.15 if column.kind in ("aborts", "late", "drafts") else 0.0,
        share_of_resets=dice.choice((0.0, 0.03)) if has_few_blocks and not column.is_async else 0.0,
        recomputes=recomputes,
    )


def _prompts(dice: random.Random, unit: int) -> list[list[int]]:
    """Prompts that share prefixes with each other; many end or part at a block or a match unit."""

    def tokens(num: int) -> list[int]:
        return [NUM_TOKENS + dice.randrange(50) for _ in range(num)]

    def length(most: int) -> int:
        return max(1, min(most, dice.randint(1, most) // dice.choice((1, unit, BLOCK)) * dice.choice((1, unit, BLOCK))))

    trunks = [tokens(dice.randint(2 * BLOCK, 6 * BLOCK)) for _ in range(dice.choice((1, 1, 2)))]
    prompts = []
    for _ in range(dice.randint(4, 14)):
        trunk = dice.choice(trunks)
        prompt = trunk[: length(len(trunk))] + tokens(dice.choice((0, 1, 3, length(2 * BLOCK))))
        prompts.append(prompt)
        if dice.random() < 0.3:
            trunks.append(prompt)
    return prompts


class Run:
    """An engine without a model: ``EngineCore``'s order of calls, with the oracle in place of the runner."""

    def __init__(self, plan: Plan, seed: int, column: Column) -> None:
        self._plan = plan
        self._dice = random.Random(f"{seed} {column.name} run")
        PoisonConnector.habits = plan.habits
        self._scheduler = make_scheduler(plan.settings)
        self._prefixes = Prefixes()
        self.worker = Worker(
            self._prefixes,
            BLOCK,
            plan.settings.num_state_groups,
            plan.settings.is_asynchronous,
            plan.habits.reports_blocks,
            column.kind == "late",
            2 * BLOCK if plan.settings.has_window else 0,
            plan.habits.unit if plan.settings.keeps_checkpoints else 0,
            plan.settings.is_v2,
        )
        self.verdict = Verdict()
        self._steps: deque[tuple[SchedulerOutput, StepResult]] = deque()
        self._delivered: dict[str, list[int]] = {request.request_id: [] for request in plan.requests}
        self._ended: set[str] = set()
        self._num_idle = 0

    def run(self) -> None:
        waiting = deque(zip(self._plan.arrivals, self._plan.requests, strict=False))
        while waiting or self._steps or self._scheduler.has_requests():
            while waiting and waiting[0][0] <= self.verdict.num_steps:
                request = self._next_turn(waiting.popleft()[1])
                self._note(f"add {request.request_id}, {request.num_tokens} tokens")
                self._scheduler.add_request(request)
            self._reset()
            self._abort()
            self._step()
            self.verdict.num_steps += 1
            if self.verdict.num_steps > MOST_STEPS or (self._num_idle > MOST_IDLE_STEPS and not waiting):
                unfinished = {name: str(request.status) for name, request in self._scheduler.requests.items()}
                raise Wrong(f"hangs: {unfinished}")
        self._check_end()

    def _next_turn(self, request: Request) -> Request:
        """With drafts some requests go on from an earlier one's answer, whose states accepted drafts have passed."""
        ended = [name for name in sorted(self._ended) if self._delivered[name]]
        if not self._plan.settings.num_drafts or not ended or self._dice.random() < 0.3:
            return request
        earlier = self._plan.requests[int(self._dice.choice(ended)[1:])]
        tokens = [*(earlier.prompt_token_ids or ()), *self._delivered[earlier.request_id], NUM_TOKENS]
        tokens = tokens[: LONGEST_TURN - request.max_tokens]
        turn = make_request(request.request_id, tokens, request.max_tokens, self._plan.settings)
        self._plan.requests[int(request.request_id[1:])] = turn
        return turn

    def _step(self) -> None:
        """``step_with_batch_queue``, and with one step in flight ``step``."""
        most = 2 if self._plan.settings.is_asynchronous else 1
        if self._scheduler.has_requests():
            step = self._scheduler.schedule()
            self._note("step", step)
            result = self.worker.execute(step)
            self.verdict.num_failed_loads += len(result.report.failed_recving) + bool(result.report.invalid_block_ids)
            self._steps.append((step, result))
            if self._plan.settings.is_asynchronous:
                self.worker.propose(self._drafts_behind(result))
            scheduled = bool(step.num_scheduled_tokens)
            self._num_idle = 0 if scheduled or result.num_loads else self._num_idle + 1
            if len(self._steps) < most and (scheduled or self._scheduler.has_requests()):
                return
        if self._steps:
            self._abort()
            step, result = self._steps.popleft()
            report = result.report
            self._note("update", result.sampled, report)
            self._check_stored(result)
            self._deliver(self._scheduler.update_from_output(step, runner_output(result.sampled, report)))
            if not self._plan.settings.is_asynchronous:
                drafts = self._drafts_behind(result)
                self._scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def _drafts_behind(self, result: StepResult) -> dict[str, list[int]]:
        num_drafts = self._plan.settings.num_drafts
        names = [name for name, tokens in result.sampled.items() if tokens and num_drafts]
        return {name: self._drafts(name, num_drafts) for name in names}

    def _drafts(self, name: str, most: int) -> list[int]:
        """Some that are right, then some that are not, unless it stops there; an asynchronous step has all."""
        right = self.worker.next_tokens(name, self._dice.randint(0, most))
        num_wrong = most - len(right)
        if not self._plan.settings.is_asynchronous:
            num_wrong = self._dice.choice((0, num_wrong))
        return right + [right_token(0) + NUM_TOKENS] * num_wrong

    def _abort(self) -> None:
        if self._dice.random() >= self._plan.share_of_aborts or not self._scheduler.requests:
            return
        names = self._dice.sample(sorted(self._scheduler.requests), 1)
        self._note(f"abort {names}")
        self._ended.update(names)
        self._scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def _reset(self) -> None:
        """``reset_prefix_cache`` refuses while blocks wait for a load."""
        if self._dice.random() >= self._plan.share_of_resets:
            return
        waits = RequestStatus.WAITING_FOR_REMOTE_KVS
        if any(request.status == waits or request.is_finished() for request in self._scheduler.requests.values()):
            return
        if self._scheduler.kv_holding_waiting:
            return
        self._note("reset the prefix cache, with its running requests")
        self._scheduler.reset_prefix_cache(reset_running_requests=True)

    def _deliver(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for output in (output for client in outputs.values() for output in client.outputs):
            name = output.request_id
            if name in self._ended:
                raise Wrong(f"{name} gets {output.new_token_ids} after its end")
            self._delivered[name] += output.new_token_ids
            self._check_tokens(name)
            if output.finish_reason is None:
                continue
            self._num_idle = 0
            self._ended.add(name)
            request = self._plan.requests[int(name[1:])]
            if output.finish_reason == FinishReason.ERROR:
                self.verdict.num_errors += 1
                if self._plan.recomputes:
                    raise Wrong(f"{name} ends with an error")
            elif len(self._delivered[name]) != request.max_tokens:
                raise Wrong(f"{name} ends after {len(self._delivered[name])} of {request.max_tokens} tokens")

    def _check_tokens(self, name: str) -> None:
        request = self._plan.requests[int(name[1:])]
        prefix = EMPTY
        for token in request.prompt_token_ids or ():
            prefix = self._prefixes.extend(prefix, token)
        for i, token in enumerate(self._delivered[name]):
            if token == POISONED_TOKEN:
                raise Wrong(f"{name}: token {i} is computed from poison")
            if token != right_token(prefix):
                raise Wrong(f"{name}: token {i} is out of order")
            prefix = self._prefixes.extend(prefix, token)

    def _check_stored(self, result: StepResult) -> None:
        """A connector commits nothing until a step is taken in, and drops it all where a step has used a bad load."""
        if result.has_used_bad_load:
            for _, later in self._steps:
                later.stored.clear()
        elif any(state != right for state, right in result.stored):
            raise Wrong("a state is offered for storing that is another's")

    def _check_end(self) -> None:
        for request in self._plan.requests:
            if request.request_id not in self._ended:
                raise Wrong(f"{request.request_id} never ends")
        if not self._scheduler.reset_prefix_cache():
            raise Wrong("blocks leak")
        containers = {name: value for name, value in vars(self._scheduler).items() if isinstance(value, _CONTAINERS)}
        leaks = {name: value for name, value in containers.items() if _holds(value, self._delivered)}
        if leaks:
            raise Wrong(f"the scheduler still remembers {leaks}")

    def _note(self, *said: object) -> None:
        if self.worker.trace is not None:
            self.worker.trace.append(" ".join(map(str, said)))


def _holds(value: Iterable[object], names: dict[str, list[int]]) -> bool:
    return any(getattr(item, "request_id", item) in names for item in value if isinstance(item, str | Request))


def run_seed(seed: int, column: Column, may_fail: bool = True, verbose: bool = False) -> Verdict:
    """What one seed of a column shows. Called by the command, and by tests, which also want loads that all succeed."""
    plan = make_plan(seed, column, may_fail)
    run = Run(plan, seed, column)
    if verbose:
        run.worker.trace = run.verdict.trace
        run.verdict.trace += [f"{plan.settings}", f"{plan.habits}"]
    try:
        run.run()
    except Wrong as error:
        run.verdict.problem = str(error)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        run.verdict.problem = f"{type(error).__name__} at {last.filename.rpartition('/')[2]}:{last.lineno}: {error}"
        if verbose:
            run.verdict.trace.append(traceback.format_exc())
    return run.verdict


COLUMNS = tuple(
    Column(groups, is_async, kind, below, is_v2)
    for is_v2 in (False, True)
    for groups in (0, 1)
    for is_async in (False, True)
    for kind in ("plain", "aborts", "few", "late", "window", "priorities", "checkpoints", "drafts")
    if groups or kind != "checkpoints"
    for below in ((False, True) if groups else (False,))
)
"""With one group of attention vLLM's match unit is the block."""
