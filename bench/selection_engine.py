# SPDX-License-Identifier: Apache-2.0
"""How well ``load_weight`` chooses in a real engine: ``python -m bench.selection_engine``.

A tiny hybrid model serves behind the MultiConnector with two tiers. The CPU tier has the beginning of each prompt. The
other tier has more of it and takes its time. Its pace is set by what computing takes on this machine, so that the slow
tier is right for some prompts and wrong for others.

In each round every prompt is served four times: as the rule chooses, and forced in three ways. Nobody loads, one tier
loads, or the other loads. The rule learns from its own requests alone. A choice costs the median time of the same
prompt served in that way by force. The oracle makes the cheapest choices.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.measure import table
from bench.own_process import REPOSITORY, measured_in_own_process
from bench.watched_rule import Watched

PROMPTS = ((600, 1300), (500, 2400), (1300, 1400), (1200, 2700), (0, 800), (0, 2600), (2400, 2600), (700, 3300))
"""Tokens that the CPU tier and the paced tier were given of each prompt."""
CHUNK = 64
TAIL = 100
"""New tokens at a prompt's end, others each time."""
CPU, PACED = 0, 1
FORCED = (None, CPU, PACED)
"""The child that is forced to load, or None for nobody."""
WEIGHTS: tuple[tuple[float | str, float | str], ...] = (("auto", "auto"), (1.0, 0.5), (1.0, 0.8), (1.0, 1.0))
"""Of the CPU tier and of the paced tier."""


class Engine:
    """vLLM in this process. ``compute_s`` None: without tiers."""

    def __init__(self, model: str, weights: Sequence[float | str], compute_s: float | None, directory: Path) -> None:
        from vllm import LLM

        self._control = directory / "control.json"
        transfer = {} if compute_s is None else {"kv_transfer_config": self._transfer(weights, compute_s)}
        self._llm = LLM(
            model,
            max_model_len=8192,
            max_num_batched_tokens=2304,
            prefix_match_unit=64,
            enable_prefix_caching=True,
            enforce_eager=True,
            **transfer,
        )

    def _transfer(self, weights: Sequence[float | str], compute_s: float) -> dict[str, Any]:
        """A load of the paced tier costs what 300 tokens cost to compute, and a third of what its tokens cost."""
        common = {"capacity_bytes": "512 MiB", "hybrid_chunk_size": CHUNK}
        pace = {"round_trip_s": 300 * compute_s, "load_s_per_object": CHUNK * compute_s / 3}
        tiers = [
            {"name": "cpu", "tier": "cpu", "load_weight": weights[0]},
            {"name": "paced", "tier": "bench.paced_tier:PacedTierSpec", "load_weight": weights[1], **pace},
        ]
        children = [
            {"kv_connector": "HybridOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": common | tier}
            for tier in tiers
        ]
        return {
            "kv_connector": "MultiConnector",
            "kv_connector_module_path": "vllm_overlay.multi_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "connectors": children,
                "control_file": str(self._control),
                "selection": "bench.watched_rule:Watched",
            },
        }

    def switch(self, switches: Mapping[str, Mapping[str, bool]]) -> None:
        """Writes the control file, which the engine looks at once a second."""
        new = self._control.with_suffix(".new")
        new.write_text(json.dumps(switches))
        new.rename(self._control)
        time.sleep(1.1)

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """The time to first token with an empty device cache, and the tokens restored."""
        from vllm import SamplingParams

        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        while scheduler.connector is not None and scheduler.connector.has_pending_push_work():
            self._llm.llm_engine.step()
        assert self._llm.reset_prefix_cache()
        started = time.perf_counter()
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return time.perf_counter() - started, output.num_cached_tokens or 0


class Workload:
    """The prompts' beginnings, and each tier's part of them once ``store`` has run."""

    def __init__(self) -> None:
        self._source = random.Random(0)
        self._beginnings = [self._text(max(parts)) for parts in PROMPTS]

    def _text(self, num_tokens: int) -> list[int]:
        return [self._source.randrange(256) for _ in range(num_tokens)]

    def prompts(self) -> list[list[int]]:
        """Each beginning, with an end that nobody has seen."""
        return [beginning + self._text(TAIL) for beginning in self._beginnings]

    def store(self, engine: Engine) -> None:
        """Each tier stores its own part, and nothing after."""
        for place, tier in enumerate(("cpu", "paced")):
            engine.switch({name: {"load": False, "store": name == tier} for name in ("cpu", "paced")})
            for beginning, parts in zip(self._beginnings, PROMPTS, strict=True):
                if parts[place]:
                    engine.first_token(beginning[: parts[place]] + self._text(1))
        engine.switch({name: {"store": False} for name in ("cpu", "paced")})


def rounds_of(engine: Engine, workload: Workload, num_rounds: int) -> dict[str, Any]:
    """``choices``: the rule's, a list a round. ``seconds``: of each forced way, a list of rounds, a round a prompt."""
    choices: list[list[int | None]] = []
    seconds: list[list[list[float]]] = [[] for _ in FORCED]
    for _ in range(num_rounds):
        Watched.is_forced = False
        for prompt in workload.prompts():
            engine.first_token(prompt)
        choices.append(Watched.choices[-len(PROMPTS) :])
        Watched.is_forced = True
        for way, forced in enumerate(FORCED):
            Watched.forced = forced
            served = [engine.first_token(prompt) for prompt in workload.prompts()]
            check_way(forced, [restored for _, restored in served])
            seconds[way].append([taken for taken, _ in served])
    return {"choices": choices, "seconds": seconds}


def check_way(forced: int | None, restored: Sequence[int]) -> None:
    """Raises RuntimeError when a forced way did not do what it is called."""
    parts = [0 if forced is None else prompt[forced] // CHUNK * CHUNK for prompt in PROMPTS]
    if list(restored) != parts:
        raise RuntimeError(f"with child {forced} loading, {list(restored)} tokens were restored, not {parts}")


def compute_seconds(model: str, directory: Path) -> float:
    """Of one token, without tiers."""
    engine = Engine(model, (), None, directory)
    workload = Workload()
    for _ in range(2):
        seconds = sum(engine.first_token(prompt)[0] for prompt in workload.prompts())
    return seconds / sum(map(len, workload.prompts()))


def side(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What one process measures. Its files lie in TMPDIR, which is removed when the process is gone."""
    directory = Path(tempfile.mkdtemp())
    if arguments["compute_s"] is None:
        return {"compute_s": compute_seconds(arguments["model"], directory)}
    engine = Engine(arguments["model"], arguments["weights"], arguments["compute_s"], directory)
    workload = Workload()
    workload.store(engine)
    return rounds_of(engine, workload, arguments["rounds"])


def row(weights: Sequence[float | str], found: Mapping[str, Any]) -> list[object]:
    """Mean time to first token of the rule's choices and of each forced way over the oracle's."""
    times = [[statistics.median(prompt) for prompt in zip(*rounds, strict=True)] for rounds in found["seconds"]]
    oracle = statistics.mean(min(ways) for ways in zip(*times, strict=True))
    chosen = [
        times[FORCED.index(loader)][prompt] for choices in found["choices"] for prompt, loader in enumerate(choices)
    ]
    shares = [statistics.mean(one) / oracle for one in (chosen, *times)]
    return [" / ".join(map(str, weights)), f"{oracle:.2f} s", *(f"{share:.2f}" for share in shares)]


def measured(**arguments: Any) -> dict[str, Any]:
    """``side`` in a process of its own."""
    return measured_in_own_process("bench.selection_engine", ["--side", json.dumps(arguments)])


def main() -> None:
    """Prints one row for each pair of weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds (default: %(default)s)")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(side(json.loads(arguments.side))))
        return
    with tempfile.TemporaryDirectory() as directory:
        model = f"{directory}/model"
        subprocess.run([sys.executable, "-m", "tools.tiny_model", model], check=True, cwd=REPOSITORY)
        compute_s = measured(model=model, compute_s=None)["compute_s"]
        rows = []
        for weights in WEIGHTS:
            print(f"weights {weights} ...", file=sys.stderr)
            found = measured(model=model, compute_s=compute_s, weights=weights, rounds=arguments.rounds)
            rows.append(row(weights, found))
    print(f"Time to first token over the oracle's; computing {1 / compute_s:.0f} tokens/s\n")
    print(table(["weights cpu / paced", "oracle", "the rule", "nobody loads", "cpu alone", "paced alone"], rows))


if __name__ == "__main__":
    main()
