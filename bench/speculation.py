# SPDX-License-Identifier: Apache-2.0
"""First token and tokens a second with speculative decoding, over HTTP, beside a server without a connector.

Two servers have the tiny hybrid model and the same drafter, and take turns: each prompt goes to the one without a
connector, to ours, which computes it, and to ours again, which restores it from its CPU tier. Then ours is restarted,
and each prompt goes to both again: ours restores it from disk. Each ratio is to the answer just before.

MTP's head has random weights, and is hardly ever right. The oracle is told the answers, and is right in none to all of
its drafts.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.first_token_chart import VOCABULARY, WrongSourceError, transfer_config
from bench.measure import ratio, table
from bench.serving_sides import ONE_THREAD
from tools.server import Server
from tools.tiny_model import make_tiny_model
from vllm_overlay.server.api_client import ApiClient

DRAFTERS = {"mtp": {"method": "mtp"}, "oracle": {"method": "custom_class", "model": "tests.engine.oracle.Oracle"}}
COLUMNS = ("side", "first token", "over no connector", "tokens/s over no connector", "accepted of a step")
_ACCEPTED, _STEPS = (f"vllm:spec_decode_num_{what}_total" for what in ("accepted_tokens", "drafts"))


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer. ``accepted``: drafts of a step, in the mean."""

    first_s: float
    tokens_per_s: float
    accepted: float
    token_ids: list[int]


def ask(api: ApiClient, prompt: Sequence[int], num_tokens: int, at_least: int = 0) -> Timed:
    """With an empty device cache. ``at_least``: so much of it must be restored, or, if 0, nothing."""
    api.reset_prefix_cache()
    before, start = api.settled_metrics(), time.monotonic()
    answer = api.complete(prompt, num_tokens)
    seconds, after = time.monotonic() - start, api.settled_metrics()
    if answer.num_cached_tokens < at_least or (not at_least and answer.num_cached_tokens):
        raise WrongSourceError(f"{answer.num_cached_tokens} tokens were cached, where {at_least} should be")
    accepted, steps = (after.value(name) - before.value(name) for name in (_ACCEPTED, _STEPS))
    rate = (num_tokens - 1) / (seconds - answer.seconds_to_first_token)
    return Timed(answer.seconds_to_first_token, rate, accepted / max(steps, 1), answer.token_ids)


def run(arguments: argparse.Namespace, directory: Path) -> Iterator[Sequence[object]]:
    """A row for each side."""
    model, known = make_tiny_model(directory / "model", has_draft_head=True), directory / "known.json"
    known.write_text("[]")
    speculation = {**DRAFTERS[arguments.drafter], "num_speculative_tokens": arguments.drafts}
    environment = {**ONE_THREAD, "ORACLE_KNOWN": str(known), "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    numbers = range(arguments.prompts + 1)  # the first is for warming up
    prompts = [random.Random(number).choices(range(VOCABULARY), k=arguments.prompt_tokens) for number in numbers]
    num_tokens, most = arguments.answer_tokens, arguments.prompt_tokens - 2 * 64

    def server(name: str, connector: dict[str, Any] | None) -> Server:
        flags = ["--speculative-config", json.dumps(speculation)]
        return Server(model, connector, log_path=directory / name, arguments=flags, environment=environment)

    def turns(asked: Callable[[list[int]], Sequence[Timed]]) -> list[tuple[Timed, ...]]:
        """Of each side, an answer to each prompt."""
        rows = []
        for number, prompt in enumerate(prompts):
            rows.append(asked(prompt))
            print(f"prompt {number} of {len(prompts) - 1}", file=sys.stderr, flush=True)
        return list(zip(*rows[1:], strict=True))

    with server("plain.log", None) as plain:
        for _ in range(2 if arguments.drafter == "oracle" else 0):  # steps with drafts round otherwise
            known.write_text(json.dumps([prompt + ask(plain, prompt, num_tokens).token_ids for prompt in prompts]))
        config = transfer_config(directory)
        with server("first.log", config) as api:

            def first(prompt: list[int]) -> Sequence[Timed]:
                without, cold = ask(plain, prompt, num_tokens), ask(api, prompt, num_tokens)
                api.wait_for_stores()
                return without, cold, ask(api, prompt, num_tokens, most)

            without, cold, by_cpu = turns(first)
        with server("second.log", config) as api:
            again, by_disk = turns(lambda prompt: (ask(plain, prompt, num_tokens), ask(api, prompt, num_tokens, most)))
    yield _row("no connector", without, without)
    yield _row("cold", cold, without)
    yield _row("from the CPU tier", by_cpu, without)
    yield _row("from disk, after a restart", by_disk, again)


def _row(name: str, own: Sequence[Timed], first: Sequence[Timed]) -> Sequence[object]:
    seconds = ratio([one.first_s for one in own], [one.first_s for one in first])
    rate = ratio([one.tokens_per_s for one in own], [one.tokens_per_s for one in first])
    accepted = mean(one.accepted for one in own)
    return name, f"{median(one.first_s for one in own) * 1000:.0f} ms", seconds, rate, f"{accepted:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", choices=DRAFTERS, default="mtp")
    parser.add_argument("--drafts", type=int, default=3, metavar="K", help="of a step (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=15, metavar="N", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=6013, metavar="N", help="default: %(default)s")
    parser.add_argument("--answer-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(table(COLUMNS, run(arguments, Path(directory))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
