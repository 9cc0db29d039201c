# SPDX-License-Identifier: Apache-2.0
"""What a connector costs an engine's thread: ``python -m bench.step_cost``.

Each side is the tiny hybrid model with one connector, or without one, on one computing thread, in a process of its own.
Scheduler and worker are on that process's one thread, as a server on a CPU has them.

Steps in which all requests decode, so that nothing is looked up, stored or loaded: sides take turns, round by round.
A round gives the median of its steps. What a side takes over the first one is the median of the rounds' ratios, with
a 95 % interval. Seconds are the thread's own. Hooks are timed in other rounds, as is the front end, which decodes a
step's output and hands it to Prometheus. Calls and bytes are those of the median step: the same in every run. Of ours
they are without what is reported four times a second.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.measure import Clock, ratio, table
from bench.serving_sides import BLOCK_TOKENS, MATCH_UNIT, NONE, OFFLOADING, OFFLOADING_FS, Side, Sizes

PROMPT_TOKENS = 100
DECODED_TOKENS = 3000
PROMPTS_TO_FILL = 12
NEW_PROMPT_TOKENS = 2000
DEVICE_BLOCKS, CPU_MIB, DISK_MIB = 48, 16, 256
"""Of a smaller disk tier stores find no room: it holds little ahead of them."""
CPU_ALONE = Side("ours, CPU tier alone", cpu=True, policy="lru")
BOTH = Side("ours, both tiers", cpu=True, disk=True, policy="lru")
SIDES = (NONE, CPU_ALONE, BOTH, OFFLOADING, OFFLOADING_FS)
ENGINE = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TORCHDYNAMO_DISABLE": "1",
}
"""The environment of an engine that runs in the process that makes it."""
END_S = 60
"""So long an engine may take to end."""
CONNECTORS = ("/vllm_overlay/", "/kv_connector/v1/", "/v1/kv_offload/")
"""Directories whose functions count as calls: ours, and vLLM's connectors with their base."""


@dataclass(slots=True)
class Step:
    """Seconds in hooks by name."""

    scheduler: Counter[str] = field(default_factory=Counter)
    worker: Counter[str] = field(default_factory=Counter)

    @property
    def seconds(self) -> float:
        return sum(self.scheduler.values()) + sum(self.worker.values())


class Stopwatch:
    """Times hooks. A hook that another one calls is part of that one."""

    def __init__(self, clock: Clock) -> None:
        """``clock``: in seconds."""
        self._clock = clock
        self.steps: list[Step] = [Step()]
        self._is_running = False
        self._watched: list[tuple[Any, str, Any]] = []

    def watch(self, target: Any, names: Sequence[str], role: str) -> None:
        """Replaces the methods of ``target`` by timed ones. ``role``: the field of ``Step`` that gets their times."""
        for name in names:
            if callable(getattr(target, name, None)):
                self.replace(target, name, self._timed(getattr(target, name), name, role))

    def replace(self, target: Any, name: str, method: Callable[..., Any]) -> None:
        """``method`` takes the place of one of ``target`` until ``stop``."""
        self._watched.append((target, name, vars(target).get(name)))
        setattr(target, name, method)

    def stop(self) -> None:
        """All methods are as they were."""
        while self._watched:
            target, name, before = self._watched.pop()
            delattr(target, name) if before is None else setattr(target, name, before)

    def _timed(self, method: Callable[..., Any], name: str, role: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return method(*args, **kwargs)
            self._is_running = True
            begin = self._clock()
            try:
                return method(*args, **kwargs)
            finally:
                getattr(self.steps[-1], role)[name] += self._clock() - begin
                self._is_running = False

        return timed


def watch_engine(core: Any, clock: Clock) -> Stopwatch:
    """From here on the hooks of this ``EngineCore`` are timed, whose worker lives in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    stopwatch, scheduler = Stopwatch(clock), core.scheduler
    hooks = [name for name in dir(KVConnectorBase_V1) if not name.startswith("_") and name != "role"]
    hooks = [name for name in hooks if not isinstance(getattr(KVConnectorBase_V1, name), property)]
    if scheduler.connector is not None:
        stopwatch.watch(scheduler.connector, hooks, "scheduler")
    if has_kv_transfer_group():
        stopwatch.watch(get_kv_transfer_group(), hooks, "worker")
    schedule = scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        stopwatch.steps.append(Step())
        return schedule(*args, **kwargs)

    stopwatch.replace(scheduler, "schedule", counted)
    return stopwatch


def make_engine(side: Side, num_layers: int, directory: Path, num_running: int = 4) -> Any:
    """vLLM in this process, for so many requests at once. What it writes lies in ``directory``."""
    from vllm import LLM

    from tools.tiny_model import make_tiny_model

    mib = (1 << 20) * max(1, num_layers // 16)  # a state of many layers has to have room
    sizes = Sizes(DEVICE_BLOCKS, CPU_MIB * mib, DISK_MIB * mib)
    config = side.transfer_config(sizes, directory / "root")
    return LLM(
        str(make_tiny_model(directory / "tiny", num_layers=num_layers)),
        max_model_len=4096,
        max_num_seqs=num_running,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=max(DEVICE_BLOCKS, 12 * num_running),
        block_size=BLOCK_TOKENS,
        mamba_ssm_cache_dtype="bfloat16",
        prefix_match_unit=MATCH_UNIT,
        enable_prefix_caching=True,
        enforce_eager=True,
        disable_log_stats=False,
        **({} if config is None else {"kv_transfer_config": config}),
    )


class Decoding:
    """An engine in this process whose requests all decode. Its steps are made here, one by one."""

    def __init__(self, engine: Any) -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self._front_end = engine.llm_engine
        self._core = self._front_end.engine_core.engine_core
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self._num_requests = 0
        self._source = random.Random(0)

    def _add_request(self, prompt_tokens: int, output_tokens: int) -> None:
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": [self._source.randrange(256) for _ in range(prompt_tokens)]}
        self._num_requests += 1
        self._front_end.add_request(str(self._num_requests), prompt, parameters)

    @contextlib.contextmanager
    def running(self, number: int) -> Iterator[None]:
        """So many requests decode, and what their prompts left to store is stored and reported."""
        scheduler = self._core.scheduler
        for _ in range(number):
            self._add_request(PROMPT_TOKENS, DECODED_TOKENS)
        while len(scheduler.running) < number or any(request.num_output_tokens < 3 for request in scheduler.running):
            self.step()
        while scheduler.connector is not None and scheduler.connector.has_pending_push_work():
            self.step()
        for _ in range(5):
            self.step()
        yield
        requests = [request.request_id for request in scheduler.running]
        self._core.abort_requests(requests)
        self._front_end.output_processor.abort_requests(requests, internal=True)
        while scheduler.has_requests():
            self.step()

    def ask(self, method: str, num_running: int, num_steps: int) -> Any:
        """What ``method`` says of so many steps while so many requests run."""
        with self.running(num_running):
            return getattr(self, method)(num_steps)

    def step(self) -> Any:
        """Its output for the one front end; None if there is none."""
        outputs, has_computed = self._core.step_fn()
        self._core.post_step(has_computed)
        return (outputs or {}).get(0)

    def seconds(self, num_steps: int) -> float:
        """The median step's."""
        found = []
        for _ in range(num_steps):
            begin = time.thread_time()
            self.step()
            found.append(time.thread_time() - begin)
        return statistics.median(found)

    def details(self, num_steps: int) -> dict[str, float]:
        """The median step's: seconds in hooks, and at the front end."""
        stopwatch, front_end = watch_engine(self._core, time.thread_time), []
        for _ in range(num_steps):
            written = self._encoder.encode(self.step())
            begin = time.thread_time()
            output = self._decoder.decode(written)
            self._front_end.logger_manager.record(
                scheduler_stats=output.scheduler_stats, iteration_stats=None, engine_idx=0
            )
            front_end.append(time.thread_time() - begin)
        stopwatch.stop()
        hooks = statistics.median(step.seconds for step in stopwatch.steps[1:])
        return {"hooks": hooks, "front_end": statistics.median(front_end)}

    def counts(self, num_steps: int) -> dict[str, Any]:
        """The median step's: calls of functions in CONNECTORS, and bytes to the front end. ``functions``: the mean
        number of calls of each. Of ours without the reports that are due four times a second, however long a step
        takes."""
        calls, sizes, functions = [], [], Counter[str]()
        with without_due_reports():
            for _ in range(num_steps):
                called, output = self._counted_step()
                functions.update(called)
                calls.append(called.total())
                sizes.append(sum(len(part) for part in self._encoder.encode(output)))
        return {
            "calls": statistics.median_low(calls),
            "bytes": statistics.median_low(sizes),
            "functions": _mean(functions, num_steps),
        }

    def storing_calls(self, num_prompts: int) -> dict[str, Any]:
        """For a prompt of NEW_PROMPT_TOKENS, from its arrival to the last report: calls, the median prompt's of those
        that come once a CPU tier of CPU_MIB evicts. Of steps that only wait for a disk as if there were one.
        ``functions``: the mean number of calls of each."""
        scheduler, calls, functions = self._core.scheduler, [], Counter[str]()
        for _ in range(PROMPTS_TO_FILL):
            self._add_request(NEW_PROMPT_TOKENS, 1)
            while scheduler.has_requests():
                self.step()
        with without_due_reports():
            for _ in range(num_prompts):
                self._add_request(NEW_PROMPT_TOKENS, 1)
                steps: list[int] = []
                waiting: list[int] = []
                while scheduler.has_requests():
                    found = steps if scheduler.has_unfinished_requests() else waiting
                    called, _ = self._counted_step()
                    functions.update(called)
                    found.append(called.total())
                least = min(waiting, default=0)
                calls.append(sum(steps) + least + sum(number - least for number in waiting))
        return {"calls": statistics.median_low(calls), "functions": _mean(functions, num_prompts)}

    def _counted_step(self) -> tuple[Counter[str], Any]:
        """Calls of functions in CONNECTORS, by name, and the step's output."""
        called = Counter[Any]()
        with counted_calls(called):
            output = self.step()
        own = Counter[str]()
        for code, number in called.items():
            if any(place in code.co_filename for place in CONNECTORS):
                own[f"{Path(code.co_filename).stem}.{code.co_qualname}"] += number
        return own, output


def _mean(functions: Counter[str], number: int) -> dict[str, float]:
    return {name: calls / number for name, calls in functions.most_common()}


@contextlib.contextmanager
def without_due_reports() -> Iterator[None]:
    """No report is due meanwhile: how many there are depends on how long steps take."""
    from vllm_overlay.tally import ReportTimes

    stopwatch = Stopwatch(time.thread_time)
    stopwatch.replace(ReportTimes, "is_due", lambda _: False)
    try:
        yield
    finally:
        stopwatch.stop()


@contextlib.contextmanager
def counted_calls(called: Counter[Any]) -> Iterator[None]:
    """Puts each code object that this thread enters meanwhile into ``called``."""

    def count(frame: Any, event: str, _argument: object) -> None:
        if event == "call":
            called[frame.f_code] += 1

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


def serve(make: Callable[[Path], Any], ask_of: Callable[[Any], Callable[..., Any]]) -> None:
    """What one process does: answers each line, which has the arguments of what it asks. ``make``: an engine, whose
    files lie in the directory. ``ask_of``: what is asked of it. The engine ends with the lines."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own words do not get among the answers
    engine = make(Path(tempfile.mkdtemp()))
    ask = ask_of(engine)
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(ask(*json.loads(line))), file=answers, flush=True)
    engine.llm_engine.engine_core.shutdown()  # what it has in /dev/shm goes


class Process:
    """A side in a process of its own, so that none leaves anything to another."""

    def __init__(self, side: Side, program: Sequence[str], directory: Path) -> None:
        """``program``: a module that calls ``serve``, and its arguments. ``directory``: for its log and its temporary
        files."""
        self.side = side
        place = directory / str(SIDES.index(side))
        place.mkdir()
        self._log_path = place / "log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *program, "--side", str(SIDES.index(side))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=Path(__file__).parent.parent,
                env={**os.environ, **ENGINE, "TMPDIR": str(place)},
            )

    def answer(self) -> Any:
        """Of the next line. Raises RuntimeError with the end of its log."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        raise RuntimeError(f"{self.side.name}: {self._log_path.read_text(errors='replace')[-3000:]}")

    def send(self, *arguments: object) -> None:
        """Several processes that have been sent something work at the same time."""
        assert self._process.stdin is not None
        print(json.dumps(arguments), file=self._process.stdin, flush=True)

    def ask(self, *arguments: object) -> Any:
        self.send(*arguments)
        return self.answer()

    def stop(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=END_S)
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def processes(sides: Sequence[Side], program: Sequence[str]) -> Iterator[list[Process]]:
    """One for each side, all ready, which runs ``program``. They are ended, and their files removed."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as started:
        found = []
        for side in sides:
            print(f"{side.name} ...", file=sys.stderr)
            process = Process(side, program, Path(directory))
            started.callback(process.stop)
            process.answer()
            found.append(process)
        yield found


def take_turns(
    sides: Sequence[Process], questions: Sequence[Sequence[object]], num_rounds: int, orders: random.Random
) -> list[list[list[Any]]]:
    """For each question, what each side answers in each round, after one that does not count. In each round the sides
    come in another of ``orders``: whom one follows is not always the same."""
    found: list[list[list[Any]]] = [[[] for _ in sides] for _ in questions]
    for number in range(num_rounds + 1):
        for question, answers in zip(questions, found, strict=True):
            for place in orders.sample(range(len(sides)), len(sides)):
                answer = sides[place].ask(*question)
                if number:
                    answers[place].append(answer)
    return found


COLUMNS = ("running", "side", "thread, ms", "over the first's", "hooks, µs", "calls", "front end, µs", "bytes")


def rows(
    seconds: Mapping[int, Sequence[Sequence[float]]], details: Mapping[int, Sequence[Mapping[str, Any]]]
) -> Iterator[Sequence[object]]:
    """One for each number of running requests and each of SIDES, the first without a connector."""
    for running, found in seconds.items():
        for side, own, one in zip(SIDES, found, details[running], strict=True):
            times = f"{1e3 * statistics.median(own):.2f}", ratio(own, found[0]), f"{1e6 * one['hooks']:.0f}"
            yield running, side.name, *times, one["calls"], f"{1e6 * one['front_end']:.0f}", one["bytes"]


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one row for each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=numbers, default=[1, 8, 32], help="requests at once (default: 1,8,32)")
    parser.add_argument("--layers", type=int, default=4, help="of the model; every fourth has attention (default: 4)")
    parser.add_argument("--steps", type=int, default=40, help="of a round (default: 40)")
    parser.add_argument("--rounds", type=int, default=12, help="(default: 12)")
    parser.add_argument("--functions", action="store_true", help="also print which functions are called in a step")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = parser.parse_args(given)
    if arguments.side is not None:
        side, num_running = SIDES[arguments.side], max(arguments.running)
        serve(
            lambda directory: make_engine(side, arguments.layers, directory, num_running),
            lambda engine: Decoding(engine).ask,
        )
        return
    with processes(SIDES, ["bench.step_cost", *given]) as sides:
        questions = [("seconds", running, arguments.steps) for running in arguments.running]
        found = take_turns(sides, questions, arguments.rounds, random.Random(0))
        seconds = dict(zip(arguments.running, found, strict=True))
        details = {
            running: [
                side.ask("details", running, arguments.steps) | side.ask("counts", running, arguments.steps)
                for side in sides
            ]
            for running in arguments.running
        }
    print(table(COLUMNS, rows(seconds, details)))
    if arguments.functions:
        for running, ones in details.items():
            for side, one in zip(SIDES, ones, strict=True):
                called = ((f"{number:.1f}", name) for name, number in one["functions"].items())
                print(f"\n{side.name}, {running} running\n\n{table(('calls', 'function'), called)}")


if __name__ == "__main__":
    main()
