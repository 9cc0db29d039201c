# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of one prompt, over HTTP: cold, from the CPU tier, from the disk tier.

One server with the tiny hybrid model and both tiers answers each of several prompts three times:

  cold                 it has never seen the prompt, and computes it
  from the CPU tier    its device cache is emptied; the CPU tier loads
  from the disk tier   its device cache is emptied again, and the control file keeps the CPU tier from loading

The three follow one another for each prompt, so that whatever else the machine does hits all of them. Each answer's
source is checked: what the workers loaded, and how many tokens were cached.
"""

import argparse
import importlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.progress import track

from bench.http_load import interrupt_at_ending_signals, status_of
from bench.measure import table
from bench.serving_sides import below_multi_connector
from tools.server import Server
from vllm_overlay.metrics import CONNECTOR
from vllm_overlay.multi_connector.control_file import LOOK_EVERY_S
from vllm_overlay.server.api_client import ApiClient

MATCH_UNIT = 64
VOCABULARY = 256
LONGEST = 8128
"""Tokens of a prompt that the tiny model takes."""
PICTURE = Path("docs/images/first-token.png")
COLUMNS = ("prompt", "first token", "over cold", "middle half")
_LOADED_BYTES = "vllm:hybrid_offload_loaded_bytes_total"


class WrongSourceError(RuntimeError):
    """A prompt came from elsewhere than it should have; the message says where from."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a prompt comes from. ``connector``: who loads it, "" for nobody."""

    name: str
    connector: str


SOURCES = (Source("cold", ""), Source("from the CPU tier", "cpu"), Source("from the disk tier", "disk"))


@dataclass(frozen=True, slots=True)
class Summary:
    """One source over all prompts: the median of the seconds, and the quartiles of the ratio to cold."""

    source: str
    seconds: float
    lower: float
    ratio: float
    """The median."""
    upper: float


def summaries(prompts: Sequence[Sequence[float]]) -> list[Summary]:
    """``prompts``: of each, at least two, the seconds to its first token in the order of SOURCES."""
    found = []
    for place, source in enumerate(SOURCES):
        lower, ratio, upper = quantiles([seconds[place] / seconds[0] for seconds in prompts], n=4, method="inclusive")
        found.append(Summary(source.name, median(seconds[place] for seconds in prompts), lower, ratio, upper))
    return found


def rows(found: Sequence[Summary]) -> Iterator[Sequence[object]]:
    for one in found:
        yield one.source, f"{one.seconds * 1000:.0f} ms", f"{one.ratio:.3f}", f"{one.lower:.3f} to {one.upper:.3f}"


def picture(found: Sequence[Summary], caption: str) -> Any:
    """A matplotlib figure with a bar for each source, cold first: the median, and a line over the middle half."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 2.7), layout="constrained")
    axes = figure.subplots()
    names, ratios = [one.source for one in found], [one.ratio for one in found]
    spread = [[one.ratio - one.lower for one in found], [one.upper - one.ratio for one in found]]
    axes.barh(names, ratios, xerr=spread, color=["#8c8c8c", "#2a6fbb", "#3d9970"], capsize=3, height=0.6)
    for place, one in enumerate(found):
        axes.text(one.upper + 0.015, place, f"{one.ratio:.2f}  ({one.seconds * 1000:.0f} ms)", va="center")
    axes.invert_yaxis()
    longest = max(one.upper for one in found)
    axes.set(title="Time to the first token, over that of the cold prompt", xlim=(0, longest + 0.25))
    axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption, fontsize=8)
    return figure


def caption(num_tokens: int, num_prompts: int) -> str:
    """What the picture says of how it was made."""
    cores = len(os.sched_getaffinity(0))
    return (
        f"{num_prompts} prompts of {num_tokens:,} tokens; bar: median, line: middle half.\n"
        f"Tiny hybrid model with random weights, on a machine with {cores} CPU cores and no GPU. "
        "Another model has other ratios."
    )


class Bench:
    """One server that is up, and its control file."""

    def __init__(self, api: ApiClient, control_file: Path) -> None:
        self._api = api
        self._control_file = control_file

    def ask(self, prompt: Sequence[int]) -> tuple[float, ...]:
        """Seconds to the first token from each source. Raises ApiError or WrongSourceError."""
        found = []
        for source in SOURCES:
            self._let_load(source)
            self._api.reset_prefix_cache()
            found.append(self._seconds(prompt, source))
            self._api.wait_for_stores()
        return tuple(found)

    def _let_load(self, source: Source) -> None:
        """The next request is the first that the server looks at its control file for."""
        self._control_file.write_text(json.dumps({"cpu": {"load": source.connector != "disk"}}))
        time.sleep(1.1 * LOOK_EVERY_S)

    def _seconds(self, prompt: Sequence[int], source: Source) -> float:
        before = self._api.settled_metrics().values(_LOADED_BYTES, CONNECTOR)
        answer = self._api.complete(prompt, 1)
        after = self._api.settled_metrics().values(_LOADED_BYTES, CONNECTOR)
        loaded = [name for name, num_bytes in after.items() if num_bytes > before.get(name, 0)]
        restorable = (len(prompt) - 1) // MATCH_UNIT * MATCH_UNIT if source.connector else 0
        if loaded != [source.connector] * bool(source.connector) or answer.num_cached_tokens != restorable:
            raise WrongSourceError(
                f"{source.name}: {answer.num_cached_tokens} tokens were cached, where {restorable} should be, "
                f"and who loaded is {' and '.join(loaded) or 'nobody'}"
            )
        return answer.seconds_to_first_token


def transfer_config(directory: Path) -> dict[str, Any]:
    """Both tiers. Their weights are given, so that nothing is computed to measure it."""
    cpu: dict[str, Any] = {"tier": "cpu", "capacity_bytes": "1 GiB", "load_weight": 1.0}
    disk = {"tier": "disk", "root": str(directory / "root"), "capacity_bytes": "2 GiB", "load_weight": 0.9}
    return below_multi_connector([cpu, disk], control_file=str(directory / "control.json"))


def run(arguments: argparse.Namespace, console: Console) -> list[tuple[float, ...]]:
    """The first prompt does not count: torch and the tiers have their first of everything in it."""
    models = importlib.import_module("tools.tiny_model")  # untyped
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        model = models.make_tiny_model(directory / "tiny")
        server = Server(model, transfer_config(directory), log_path=directory / "server.log")
        with server as api:
            bench = Bench(api, directory / "control.json")
            numbers = track(range(arguments.prompts + 1), "prompts, the first for warming up", console=console)
            return [bench.ask(_prompt(arguments.prompt_tokens, number)) for number in numbers][1:]


def _prompt(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=num_tokens)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.first_token_chart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--prompts", type=int, default=15, metavar="N", help="how many (default: %(default)s)")
    length = f"of each, at most {LONGEST} (default: %(default)s)"
    made.add_argument("--prompt-tokens", type=int, default=8013, metavar="N", help=length)
    made.add_argument("--plot", type=Path, default=PICTURE, metavar="FILE", help="the picture (default: %(default)s)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.prompts < 2 or not MATCH_UNIT < arguments.prompt_tokens <= LONGEST:
        parser().error(f"give at least 2 prompts, of {MATCH_UNIT + 1} to {LONGEST} tokens")

    def draw(console: Console) -> int:
        found = summaries(run(arguments, console))
        said = caption(arguments.prompt_tokens, arguments.prompts)
        picture(found, said).savefig(arguments.plot, dpi=120)
        print(table(COLUMNS, rows(found)))
        print(f"\n{said}\n{arguments.plot}")
        return 0

    return status_of(draw)


if __name__ == "__main__":
    interrupt_at_ending_signals()
    sys.exit(main())
