# SPDX-License-Identifier: Apache-2.0
"""The main job, shown: a hybrid model's cache comes back from the CPU tier and, after a restart, from the disk tier.

Serves the tiny hybrid model with a weighted MultiConnector over both tiers, sends one prompt three times over HTTP
(cold, with the device cache emptied, to a new server) and compares tokens and logprobs with the cold run, exactly.
"""

import argparse
import contextlib
import fcntl
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from tools.process_group import ENDING_SIGNALS
from tools.server import Server
from tools.server_process import ServerError
from tools.setup_cpu import Progress
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, make_tiny_model
from vllm_overlay.metrics import CONNECTOR
from vllm_overlay.server.api_client import ApiClient, ApiError, Completion, Metrics

MATCH_UNIT = 64
NUM_OUTPUT_TOKENS = 16
DEFAULT_PROMPT_TOKENS = 62 * MATCH_UNIT + 13
"""A few tokens past a restore point: the fewer are computed anew, the more a wrong restore shows."""
_LOADED_BYTES = "vllm:hybrid_offload_loaded_bytes_total"
_TOKEN_BYTES = "vllm:hybrid_offload_token_bytes"
_STATE_BYTES = "vllm:hybrid_offload_state_bytes"


class DemoError(Exception):
    """Ends the demo; the message says why."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the server says a connector moves. vLLM chooses the dtype of states, and so their size, by the processor."""

    token_bytes: float
    state_bytes: float

    def restored_bytes(self, num_tokens: int) -> int:
        """Keys and values of so many tokens, and one snapshot of the states after them."""
        return int(num_tokens * self.token_bytes + self.state_bytes)


@dataclass(frozen=True, slots=True)
class Row:
    """One request: what it answered, and by connector what the workers say they loaded for it, of which sizes."""

    request: str
    expected_source: str
    completion: Completion
    loaded_bytes: dict[str, int]
    geometries: dict[str, Geometry]

    @property
    def sources(self) -> list[str]:
        """The connectors that loaded something."""
        return [name for name, num_bytes in self.loaded_bytes.items() if num_bytes]


def make_prompt(num_tokens: int) -> str:
    """Text of so many bytes, which are tokens; always the same."""
    source = random.Random(num_tokens)
    words = ("cache", "layer", "state", "token", "block", "restore", "compute", "equal", "every", "byte")
    text = "Once"
    while len(text) < num_tokens:
        text += " " + source.choice(words)
    return text[:num_tokens]


def restorable_tokens(num_tokens: int) -> int:
    """The last restore point below the prompt's end."""
    return (num_tokens - 1) // MATCH_UNIT * MATCH_UNIT


def geometries(metrics: Metrics) -> dict[str, Geometry]:
    """Of each connector."""
    tokens, states = (metrics.values(name, CONNECTOR) for name in (_TOKEN_BYTES, _STATE_BYTES))
    return {name: Geometry(tokens.get(name, 0), states.get(name, 0)) for name in {*tokens, *states}}


def transfer_config(root: Path) -> dict[str, Any]:
    """The ``--kv-transfer-config``: both tiers store; the one with more tokens x load_weight loads."""
    tiers: tuple[dict[str, Any], ...] = (
        {"name": "cpu", "tier": "cpu", "capacity_bytes": "256 MiB", "load_weight": 1.0},
        {"name": "disk", "tier": "disk", "root": str(root.resolve()), "capacity_bytes": "1 GiB", "load_weight": 0.5},
    )
    children = [
        {"kv_connector": "HybridOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": tier}
        for tier in tiers
    ]
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "vllm_overlay.multi_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }


class Demo:
    """One run in ``directory``: the model and what torch compiles stay there, ``run`` is made anew and removed."""

    def __init__(self, directory: Path, num_tokens: int, port: int | None) -> None:
        self.model = directory / "model"
        self.run = directory / "run"
        self.root = self.run / "root"
        self.prompt = make_prompt(num_tokens)
        self._port = port
        self._compiled = directory / "torchinductor"
        self._progress = Progress()

    def prepare(self) -> None:
        """The model unless it is there, and an empty place for this run."""
        shutil.rmtree(self.run, ignore_errors=True)
        self.run.mkdir()
        with self._progress.step("make the tiny hybrid model"):
            make_tiny_model(self.model)

    def first_life(self) -> list[Row]:
        """Cold, then from the CPU tier."""
        with self._serving("first") as api:
            rows = [self._ask(api, "cold", expected_source="")]
            with self._progress.step("empty the device cache"):
                api.reset_prefix_cache()
            rows.append(self._ask(api, "again, device cache emptied", expected_source="cpu"))
            with self._progress.step("wait until no store is pending"):
                api.wait_for_stores()
        return rows

    def second_life(self) -> list[Row]:
        """From the disk tier."""
        with self._serving("second") as api:
            return [self._ask(api, "again, new server", expected_source="disk")]

    @contextlib.contextmanager
    def _serving(self, name: str) -> Iterator[ApiClient]:
        server = Server(
            self.model,
            transfer_config(self.root),
            log_path=self.run / f"{name}-server.log",
            port=self._port,
            environment={"TORCHINDUCTOR_CACHE_DIR": str(self._compiled)},
        )
        with contextlib.ExitStack() as stack:
            with self._progress.step(f"start the {name} server"):
                api = stack.enter_context(server)
            with self._progress.step("warm it up with another prompt"):
                api.complete("!" * (2 * MATCH_UNIT), max_tokens=2)
            yield api
            with self._progress.step(f"stop the {name} server"):
                server.stop()

    def _ask(self, api: ApiClient, request: str, expected_source: str) -> Row:
        with self._progress.step(f"send the prompt: {request}"):
            before = api.settled_metrics().values(_LOADED_BYTES, CONNECTOR)
            completion = api.complete(self.prompt, NUM_OUTPUT_TOKENS)
            metrics = api.settled_metrics()
        after = metrics.values(_LOADED_BYTES, CONNECTOR)
        loaded = {name: int(num_bytes - before.get(name, 0)) for name, num_bytes in after.items()}
        return Row(request, expected_source, completion, loaded, geometries(metrics))

    def faults(self, rows: Sequence[Row]) -> list[str]:
        """A sentence for each row that is not what it should be."""
        return [fault for row in rows if (fault := self._fault(row, cold=rows[0]))]

    def _fault(self, row: Row, cold: Row) -> str:
        source = row.expected_source
        expected_tokens = restorable_tokens(row.completion.num_prompt_tokens) if source else 0
        geometry = row.geometries.get(source, Geometry(0, 0))
        expected = {source: geometry.restored_bytes(expected_tokens)} if source else {}
        loaded = {name: num_bytes for name, num_bytes in row.loaded_bytes.items() if num_bytes}
        if not row.completion.same_as(cold.completion):
            return f"the output of {row.request!r} differs from the cold run's: {_difference(row, cold)}"
        if row.completion.num_cached_tokens != expected_tokens:
            return f"{row.request!r} restored {row.completion.num_cached_tokens} tokens and not {expected_tokens}"
        if source and not (geometry.token_bytes > 0 and geometry.state_bytes > 0):
            return f"{_TOKEN_BYTES} and {_STATE_BYTES} of {source!r} are not both above 0 on /metrics: {geometry}"
        if loaded != expected:
            return f"for {row.request!r} the workers loaded {loaded or 'nothing'} bytes and not {expected or 'nothing'}"
        return ""


def _difference(row: Row, cold: Row) -> str:
    """The first token that is another, or has another logprob (NaN is never equal)."""
    own, expected = row.completion, cold.completion
    tokens = zip(own.token_ids, own.logprobs, expected.token_ids, expected.logprobs, strict=False)
    for i, (token, logprob, expected_token, expected_logprob) in enumerate(tokens):
        if token != expected_token or logprob != expected_logprob:
            return f"token {i + 1} is {token} (logprob {logprob}) and not {expected_token} ({expected_logprob})"
    return f"{len(own.token_ids)} tokens and not {len(expected.token_ids)}"


def show(rows: Sequence[Row], console: Console) -> None:
    """The table."""
    table = Table(title="One prompt, three times")
    table.add_column("request")
    for name in ("prompt tokens", "restored", "bytes loaded", "first token"):
        table.add_column(name, justify="right")
    table.add_column("from")
    table.add_column("output equals the cold run's")
    for row in rows:
        answer = row.completion
        equal = "tokens and logprobs" if answer.same_as(rows[0].completion) else "NO"
        table.add_row(
            row.request,
            str(answer.num_prompt_tokens),
            str(answer.num_cached_tokens),
            f"{sum(row.loaded_bytes.values()):,}",
            f"{answer.seconds_to_first_token * 1000:.0f} ms",
            " ".join(row.sources) or "-",
            "(is the cold run)" if row is rows[0] else equal,
        )
    console.print(table)


@contextlib.contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Two demos cannot share a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise DemoError(f"another demo runs in {directory}: wait for it, or set --directory") from error
    finally:
        os.close(descriptor)


def run_demo(arguments: argparse.Namespace) -> None:
    """Raises DemoError, ServerError or ApiError."""
    demo = Demo(arguments.directory, arguments.prompt_tokens, arguments.port)
    with one_at_a_time(arguments.directory):
        try:
            demo.prepare()
            rows = demo.first_life() + demo.second_life()
        finally:
            if arguments.keep:
                print(f"kept: {demo.run} (until the next demo)", flush=True)
            else:
                shutil.rmtree(demo.run, ignore_errors=True)
        show(rows, Console(width=None if sys.stdout.isatty() else 140))
        if faults := demo.faults(rows):
            raise DemoError("; ".join(faults))


def _prompt_tokens(text: str) -> int:
    longest = DEFAULT_CONTEXT_TOKENS - NUM_OUTPUT_TOKENS
    if not text.isdigit() or not MATCH_UNIT < int(text) <= longest:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {MATCH_UNIT + 1} to {longest}")
    return int(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools/demo.py"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=_prompt_tokens,
        default=DEFAULT_PROMPT_TOKENS,
        metavar="N",
        help="length of the prompt (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, help="of the server, on 127.0.0.1 (default: a free one)")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(".demo"),
        metavar="DIR",
        help="for the model and the run (default: %(default)s)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the disk tier's root and the servers' logs")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        run_demo(arguments)
    except (DemoError, ServerError, ApiError, OSError) as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: nothing is left running", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
