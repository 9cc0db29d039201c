# SPDX-License-Identifier: Apache-2.0
"""What a connector costs an engine's thread: ``python -m bench.step_cost``.

Every hook is timed that vLLM calls on the connectors of the scheduler and of the worker, and how the scheduler makes
its report for the front end. The model is the tiny hybrid one, on one computing thread, in one process for each side.

Nothing to do: one request decodes, so nothing is looked up, stored or loaded. Each step gives a sum. What counts is
the sum that a tenth of the steps stay below: other programs on the machine only add to it.

--storing: prompts that nobody has seen, eight sent together, into tiers that are full and evict. Seconds are the
thread's own, so that other programs do not count. Copies from the KV cache are in them, writes to a disk are not.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bench.measure import Clock, percentile, table
from bench.serving_sides import BLOCK_TOKENS, MATCH_UNIT, NONE, OFFLOADING, OFFLOADING_FS, Side, Sizes

PROMPT_TOKENS = 300
ROUNDS_TO_FILL = range(4, 100)
NEW_PROMPT_TOKENS, PROMPTS_AT_ONCE, OUTPUT_TOKENS = 2000, 8, 4
SIZES = Sizes(device_blocks=48, cpu_bytes=32 << 20, disk_bytes=256 << 20)
SIDES = (
    NONE,
    Side("ours, CPU tier", cpu=True, policy="lru"),
    Side("ours, both tiers", cpu=True, disk=True, policy="lru"),
    OFFLOADING,
    OFFLOADING_FS,
)
ENGINE = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TORCHDYNAMO_DISABLE": "1",
}
"""The environment of an engine that runs in the process that makes it."""


@dataclass(slots=True)
class Step:
    """Seconds in hooks by name, and the bytes of the connectors' part of the report to the front end."""

    scheduler: Counter[str] = field(default_factory=Counter)
    worker: Counter[str] = field(default_factory=Counter)
    report_bytes: int = 0


class Stopwatch:
    """Times hooks. A hook that another one calls is part of that one."""

    def __init__(self, clock: Clock) -> None:
        """``clock``: in seconds."""
        self._clock = clock
        self.steps: list[Step] = [Step()]
        self._is_running = False

    def watch(self, target: Any, names: Sequence[str], role: str) -> None:
        """Replaces the methods of ``target`` by timed ones. ``role``: the field of ``Step`` that gets their times."""
        for name in names:
            if callable(getattr(target, name, None)):
                setattr(target, name, self._timed(getattr(target, name), name, role))

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
    stopwatch.watch(scheduler, ["make_stats"], "scheduler")
    make_stats, schedule = scheduler.make_stats, scheduler.schedule

    def weighed(*args: Any, **kwargs: Any) -> Any:
        stats = make_stats(*args, **kwargs)
        if stats is not None and stats.kv_connector_stats:
            stopwatch.steps[-1].report_bytes += len(msgspec.msgpack.encode(stats.kv_connector_stats))
        return stats

    def counted(*args: Any, **kwargs: Any) -> Any:
        stopwatch.steps.append(Step())
        return schedule(*args, **kwargs)

    scheduler.make_stats, scheduler.schedule = weighed, counted
    return stopwatch


def usual(seconds: Iterable[float]) -> float:
    """Microseconds that a tenth of them stay below."""
    return 1e6 * percentile(list(seconds), 0.1)


def make_engine(side: Side, num_layers: int, directory: Path) -> Any:
    """vLLM in this process. What it writes lies in ``directory``."""
    from vllm import LLM

    from tools.tiny_model import make_tiny_model

    config = side.transfer_config(SIZES, directory / "root")
    return LLM(
        str(make_tiny_model(directory / "tiny", num_layers=num_layers)),
        max_model_len=4096,
        max_num_seqs=4,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=SIZES.device_blocks,
        block_size=BLOCK_TOKENS,
        mamba_ssm_cache_dtype="bfloat16",
        prefix_match_unit=MATCH_UNIT,
        enable_prefix_caching=True,
        enforce_eager=True,
        disable_log_stats=False,
        **({} if config is None else {"kv_transfer_config": config}),
    )


def measure_idle(engine: Any, num_steps: int) -> dict[str, Any]:
    """Microseconds a step, of all hooks and of each, and the mean bytes of a report."""
    from vllm import SamplingParams

    stopwatch = watch_engine(engine.llm_engine.engine_core.engine_core, time.perf_counter)
    # The first half may still store the prompt.
    parameters = SamplingParams(temperature=0, max_tokens=2 * num_steps, ignore_eos=True)
    engine.generate({"prompt_token_ids": [token % 256 for token in range(PROMPT_TOKENS)]}, parameters, use_tqdm=False)
    steps = stopwatch.steps[-num_steps - 1 : -1]
    return {
        "scheduler": usual(sum(step.scheduler.values()) for step in steps),
        "worker": usual(sum(step.worker.values()) for step in steps),
        "report_bytes": sum(step.report_bytes for step in steps) / len(steps),
        "hooks": {
            f"{role}: {name}": usual(getattr(step, role)[name] for step in steps)
            for role in ("scheduler", "worker")
            for name in sorted({name for step in steps for name in getattr(step, role)})
        },
    }


def fill(engine: Any, send: Callable[[], None], num_tiers: int) -> None:
    """Sends prompts until all tiers of ours evict. Raises RuntimeError if not all do after 99 rounds."""
    for number in range(1, ROUNDS_TO_FILL.stop):
        send()
        evicted = [one for one in engine.get_metrics() if one.name == "vllm:hybrid_offload_evicted_objects"]
        if number >= ROUNDS_TO_FILL.start and sum(one.value > 0 for one in evicted) == num_tiers:
            return
    raise RuntimeError(f"not all {num_tiers} tiers evict after {ROUNDS_TO_FILL.stop - 1} rounds of prompts: {evicted}")


def measure_storing(engine: Any, num_rounds: int, num_tiers: int) -> dict[str, Any]:
    """Milliseconds a prompt in hooks, their share of the thread's time, and the process's CPU seconds a prompt.

    ``num_tiers``: those of ours, which are to be full.
    """
    from vllm import SamplingParams

    stopwatch = watch_engine(engine.llm_engine.engine_core.engine_core, time.thread_time)
    parameters = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    source = random.Random(0)

    def send() -> None:
        prompts = [[source.randrange(256) for _ in range(NEW_PROMPT_TOKENS)] for _ in range(PROMPTS_AT_ONCE)]
        engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)

    fill(engine, send, num_tiers)
    stopwatch.steps[:] = [Step()]
    thread_s, process_s = time.thread_time(), time.process_time()
    for _ in range(num_rounds):
        send()
    thread_s, process_s = time.thread_time() - thread_s, time.process_time() - process_s
    num_prompts = num_rounds * PROMPTS_AT_ONCE
    roles = {
        role: sum(sum(getattr(step, role).values()) for step in stopwatch.steps) for role in ("scheduler", "worker")
    }
    return {
        **{role: 1e3 * seconds / num_prompts for role, seconds in roles.items()},
        "share": sum(roles.values()) / (thread_s - sum(roles.values())),
        "process_s": process_s / num_prompts,
    }


def measure(side: Side, arguments: argparse.Namespace) -> dict[str, Any]:
    """What one process does. Its files lie in TMPDIR, which is removed when the process is gone."""
    engine = make_engine(side, 4 if arguments.storing else arguments.layers, Path(tempfile.mkdtemp()))
    if not arguments.storing:
        return measure_idle(engine, arguments.steps)
    return measure_storing(engine, arguments.rounds, side.cpu + side.disk if side.is_ours else 0)


def measured_in_own_process(arguments: Sequence[str]) -> dict[str, Any]:
    """What this program prints as JSON on its last line: no side leaves anything to the next.

    Its temporary files are removed when it is gone. Raises RuntimeError with the end of its log.
    """
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, **ENGINE, "TMPDIR": directory}
        command = [sys.executable, "-m", "bench.step_cost", *arguments]
        done = subprocess.run(command, capture_output=True, cwd=Path(__file__).parent.parent, env=environment)
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stderr.decode(errors='replace')[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


COLUMNS = ("side", "scheduler, µs", "worker, µs", "together", "over OffloadingConnector's", "report, bytes a step")


def rows(found: Sequence[dict[str, Any]]) -> Iterator[Sequence[object]]:
    """One for each of SIDES. The first side's time is how vLLM makes its own report, which is in all others."""
    own = found[0]["scheduler"] + found[0]["worker"]
    reference = found[SIDES.index(OFFLOADING)]
    theirs = reference["scheduler"] + reference["worker"] - own
    for side, one in zip(SIDES, found, strict=True):
        total = one["scheduler"] + one["worker"]
        times = (f"{time:.0f}" for time in (one["scheduler"], one["worker"], total))
        yield side.name, *times, f"{(total - own) / theirs:.2f}", f"{one['report_bytes']:.0f}"


STORING_COLUMNS = ("side", "scheduler, ms a prompt", "worker, ms", "of the thread's other time", "CPU s of the first's")


def storing_rows(found: Sequence[dict[str, Any]]) -> Iterator[Sequence[object]]:
    """One for each of SIDES, the first without a connector."""
    for side, one in zip(SIDES, found, strict=True):
        processor = f"{one['process_s'] / found[0]['process_s']:.3f}"
        yield side.name, f"{one['scheduler']:.2f}", f"{one['worker']:.2f}", f"{one['share']:.2%}", processor


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one row for each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24, help="of the model; every fourth has attention (default: 24)")
    parser.add_argument("--steps", type=int, default=300, help="that count (default: 300)")
    parser.add_argument("--hooks", action="store_true", help="also print what each hook takes in a step")
    parser.add_argument("--storing", action="store_true", help="measure storing instead, with four layers")
    parser.add_argument("--rounds", type=int, default=12, help="of eight prompts, with --storing (default: 12)")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = parser.parse_args(given)
    if arguments.side is not None:
        print(json.dumps(measure(SIDES[arguments.side], arguments)), flush=True)
        return
    found = []
    for number, side in enumerate(SIDES):
        print(f"{side.name} ...", file=sys.stderr)
        found.append(measured_in_own_process([*given, "--side", str(number)]))
    if arguments.storing:
        print(table(STORING_COLUMNS, storing_rows(found)))
        return
    print(table(COLUMNS, rows(found)))
    if arguments.hooks:
        names = sorted({name for one in found for name in one["hooks"]})
        print("\n" + table(("hook, µs", *(side.name for side in SIDES)), _hook_rows(names, found)))


def _hook_rows(names: Sequence[str], found: Sequence[dict[str, Any]]) -> Iterator[Sequence[object]]:
    for name in names:
        yield name, *(f"{one['hooks'].get(name, 0):.1f}" for one in found)


if __name__ == "__main__":
    main()
