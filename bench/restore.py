# SPDX-License-Identifier: Apache-2.0
"""What a restore is worth: the first token of a long prompt, computed and restored, and what a decode step costs.

    python -m bench.restore [--tokens 33000] [--rounds 5] [--json FILE]

Four engines share the GPU, or the CPU where there is none: no connector, vLLM's OffloadingConnector over its ``fs``
tier and over ``hybrid_disk``, and our own connector with a CPU tier and a disk tier. They take turns in each round, so
whatever else the machine does hits all of them. Then they end, their files leave the page cache, and the next ones
restore from the disk.

On a GPU the model has random weights and the shape of Qwen3.5-4B with half of its layers (1.6 billion parameters). On a
CPU it is the tests' tiny one, and vLLM's connector has the tests' copies. ``limit`` is what the bytes of the restored
prompt take in one copy, on a GPU from pinned memory.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.measure import ratio, table
from tools.gpu_engine import Engine, prompt
from tools.gpu_rungs import CPU_TIER, offloading, ours_on_disk
from tools.tiny_model import configuration, make_tiny_model

TIER_BYTES = {"cuda": 8 << 30, "cpu": 256 << 20}
NUM_TOKENS = {"cuda": 33_000, "cpu": 3_981}
COPIED_BYTES = 256 << 20
DISK = {"capacity_bytes": 2 * max(TIER_BYTES.values()), "namespace": "restore"}
"""Made-up weights have no file that tells them from others."""
BATCHES = (8, 32)
STEPS = 128
CLOSE_S = 30
SHAPE = {
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
ON_CUDA = {
    "attention_backend": "FLASH_ATTN",
    "gdn_prefill_backend": "triton",
    "kv_cache_memory_bytes": 4 << 30,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, *BATCHES],
    },
}

ON_CPU = {"block_size": 64, "prefix_match_unit": 64}
"""As the README advises: what a prompt shares ends anywhere."""


def fs(root: Path, device: str) -> dict[str, Any]:
    """vLLM's own file-system tier in the place of ours."""
    config = offloading(root, device, TIER_BYTES[device])
    config["kv_connector_extra_config"]["secondary_tiers"] = [{"type": "fs", "root_dir": str(root)}]
    return config


def hybrid_disk(root: Path, device: str) -> dict[str, Any]:
    config = offloading(root, device, TIER_BYTES[device])
    config["kv_connector_extra_config"]["secondary_tiers"][0] |= DISK
    return config


def ours(root: Path, device: str) -> dict[str, Any]:
    config = ours_on_disk(root, device)
    (disk,) = children = config["kv_connector_extra_config"]["connectors"]
    disk["kv_connector_extra_config"] |= {**DISK, "load_weight": 0.9}
    extra = {**CPU_TIER["kv_connector_extra_config"], "capacity_bytes": TIER_BYTES[device]}  # type: ignore[dict-item]
    children.insert(0, {**CPU_TIER, "kv_connector_extra_config": extra})
    return config


SIDES: dict[str, Callable[[Path, str], dict[str, Any]] | None] = {
    "no connector": None,
    "vLLM's, fs": fs,
    "vLLM's, hybrid_disk": hybrid_disk,
    "ours": ours,
}
RIVAL = "vLLM's, fs"
"""What a user would take instead."""


def write_shape(directory: Path) -> Path:
    """A configuration alone: vLLM makes up the weights."""
    from transformers import Qwen3_5TextConfig

    fields: dict[str, Any] = {**configuration(40_960, 16), **SHAPE}
    config = Qwen3_5TextConfig(**fields)
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.save_pretrained(directory)
    return directory


class Asked:
    """An engine in a process of its own. Its methods are called over the pipe."""

    def __init__(self, model: Path, device: str, config: dict[str, Any] | None, num_tokens: int) -> None:
        arguments: dict[str, Any] = {"kv_transfer_config": config, "max_num_seqs": max(BATCHES)}
        if device == "cpu":
            arguments |= ON_CPU
        else:
            arguments |= {"max_model_len": 40_960, "load_format": "dummy", "skip_tokenizer_init": True, **ON_CUDA}
        self._engine, self._num_tokens = Engine(model, device, **arguments), num_tokens

    def first_token(self, seed: int) -> tuple[float, int]:
        """Seconds, and how many tokens were cached. Then vLLM's own cache is emptied."""
        start = time.perf_counter()
        _, (num_cached,) = self._engine.answers([prompt(self._num_tokens, seed)], 1)
        seconds = time.perf_counter() - start
        self._engine.evict()
        return seconds, num_cached

    def step(self, batch: int) -> float:
        """Seconds of one decode step with so many requests, whose prompts are too short to be kept."""
        prompts = [prompt(64, 1000 + number) for number in range(batch)]
        seconds = []
        for num_tokens in (1, STEPS + 1):
            start = time.perf_counter()
            self._engine.answers(prompts, num_tokens)
            seconds.append(time.perf_counter() - start)
        return (seconds[1] - seconds[0]) / STEPS

    def restored_bytes(self, num_cached: int) -> int:
        """Of a hybrid model on the device: attention for all tokens, and one state a layer."""
        total = 0
        for group in self._engine.scheduler.kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            is_state = type(spec).__name__ == "MambaSpec"
            blocks = 1 if is_state else num_cached // spec.block_size
            total += blocks * spec.page_size_bytes * len(group.layer_names)
        return total

    def close(self) -> None:
        self._engine.close()


def serve(pipe: Connection, *arguments: Any) -> None:
    """In the engine's process: one answer for each call, None for the last one."""
    asked = Asked(*arguments)
    pipe.send(None)
    name = ""
    while name != "close":
        name, values = pipe.recv()
        pipe.send(getattr(asked, name)(*values))


@dataclass(slots=True)
class Side:
    name: str
    pipe: Connection
    cold: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)
    steps: dict[int, list[float]] = field(default_factory=lambda: {batch: [] for batch in BATCHES})
    restored: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0

    def ask(self, name: str, *values: Any) -> Any:
        self.pipe.send((name, values))
        return self.pipe.recv()

    def first_token(self, seed: int, found: list[float], what: str, report: Callable[[str], None]) -> None:
        seconds, num_cached = self.ask("first_token", seed)
        report(f"{self.name}, {what}: {seconds * 1e3:.1f} ms, {num_cached} tokens restored")
        found.append(seconds)
        self.restored[what] = num_cached
        self.num_bytes = max(self.num_bytes, self.ask("restored_bytes", num_cached))


@contextmanager
def started(
    names: Sequence[str], model: Path, device: str, scratch: Path, num_tokens: int
) -> Iterator[list[Connection]]:
    """All engines, at the same time."""
    context, pipes, processes = get_context("spawn"), [], []
    for name in names:
        own, theirs = context.Pipe()
        make = SIDES[name]
        config = make(scratch / name.replace(" ", "-"), device) if make else None
        processes.append(context.Process(target=serve, args=(theirs, model, device, config, num_tokens)))
        processes[-1].start()
        theirs.close()
        pipes.append(own)
    try:
        for name, pipe in zip(names, pipes, strict=True):
            try:
                pipe.recv()
            except EOFError as error:
                raise RuntimeError(f"the engine of {name!r} ended while it started: see above") from error
        yield pipes
        for pipe in pipes:
            pipe.send(("close", ()))
            pipe.recv()
        for process in processes:
            process.join(CLOSE_S)
    finally:
        for process in processes:
            process.kill()


def forget_pages(root: Path) -> None:
    """What was written leaves the page cache, so that a read is one of the disk."""
    os.sync()
    for path in root.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(
    names: Sequence[str], model: Path, device: str, num_tokens: int, rounds: int, report: Callable[[str], None]
) -> list[Side]:
    with tempfile.TemporaryDirectory(prefix="restore-") as scratch:
        report(f"starting {len(names)} engines")
        with started(names, model, device, Path(scratch), num_tokens) as pipes:
            sides = [Side(name, pipe) for name, pipe in zip(names, pipes, strict=True)]
            for seed in range(rounds + 1):
                report(f"round {seed} of {rounds}" + (", which does not count" if not seed else ""))
                for side in _turned(sides, seed):
                    for batch, found in side.steps.items():
                        found.append(side.ask("step", batch))
                    side.first_token(seed, side.cold, "cold", report)
                for side in _turned(sides, seed):  # what is done once a prompt has been stored is done by then
                    side.first_token(seed, side.memory, "memory", report)
        forget_pages(Path(scratch))
        report("starting them anew")
        with started(names, model, device, Path(scratch), num_tokens) as pipes:
            for side, pipe in zip(sides, pipes, strict=True):
                side.pipe = pipe
                side.ask("first_token", rounds + 1)  # what a kernel takes to compile does not count
            for seed in range(rounds + 1):
                for side in _turned(sides, seed):
                    side.first_token(seed, side.disk, "disk", report)
    return sides


def _turned(sides: list[Side], number: int) -> list[Side]:
    return sides if number % 2 else sides[::-1]


def _ms(seconds: list[float]) -> str:
    """Median and least of the rounds that count."""
    return f"{statistics.median(seconds[1:]) * 1e3:.1f} ({min(seconds[1:]) * 1e3:.1f})"


def summary(sides: Sequence[Side], num_tokens: int, copy_rate: float) -> str:
    rows = []
    for side in sides:
        limit = f"{side.num_bytes / copy_rate * 1e3:.1f}" if copy_rate and side.restored["memory"] else ""
        tokens = " / ".join(str(side.restored[what]) for what in ("memory", "disk"))
        first = [_ms(seconds) for seconds in (side.cold, side.memory, side.disk)]
        rows.append((side.name, *first, tokens, limit, *(_ms(side.steps[batch]) for batch in BATCHES)))
    columns = ("side", "computed ms", "from memory ms", "from disk ms", f"of {num_tokens} tokens", "limit ms")
    return table((*columns, *(f"step at {batch} ms" for batch in BATCHES)), rows)


def ratios(sides: Sequence[Side]) -> str:
    """Of each restore's time to that of ``RIVAL`` in the same round: the median, and its interval of 95 %."""
    (rival,) = (side for side in sides if side.name == RIVAL)
    others = [side for side in sides if side.restored["memory"] and side is not rival]
    rows = []
    for side in others:
        from_disk = ratio(side.disk[1:], rival.disk[1:]) if side.restored["disk"] else ""
        rows.append((side.name, ratio(side.memory[1:], rival.memory[1:]), from_disk))
    return table((f"over {RIVAL}", "from memory", "from disk"), rows)


def copy_rate_of(device: str) -> float:
    """Bytes a second of one large copy to the device."""
    import torch

    is_cuda = device == "cuda"
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
    target = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return COPIED_BYTES / min(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", type=int, help="of a prompt; default: {cuda} on a GPU, else {cpu}".format(**NUM_TOKENS)
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds: at least 1, such as 5")
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_tokens, copy_rate = options.tokens or NUM_TOKENS[device], copy_rate_of(device)
    hardware = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} cores"
    about = f"{hardware}, torch {torch.__version__}, {copy_rate / 1e9:.1f} GB/s in one copy"
    print(about, flush=True)
    with tempfile.TemporaryDirectory(prefix="restore-") as scratch:
        model = (write_shape if device == "cuda" else make_tiny_model)(Path(scratch) / "model")
        sides = measure(list(SIDES), model, device, num_tokens, options.rounds, lambda text: print(text, flush=True))
    print(f"\nmedian (least) of {options.rounds} rounds\n\n{summary(sides, num_tokens, copy_rate)}\n\n{ratios(sides)}")
    if options.json:
        found = [{name: getattr(side, name) for name in Side.__slots__ if name != "pipe"} for side in sides]
        options.json.write_text(json.dumps({"about": about, "sides": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
