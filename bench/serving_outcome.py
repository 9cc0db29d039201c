# SPDX-License-Identifier: Apache-2.0
"""What the servers of ``bench/serving.py`` have served, and its table."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.http_load import Part
from bench.measure import percentile, ratio
from bench.scaled_trace import Reuse, ScaledRequest
from bench.serving_sides import SNAPSHOT_BYTES, TOKEN_BYTES, Side, Sizes


@dataclass(frozen=True, slots=True)
class Plan:
    """What is served: made once, the same for each side."""

    requests: tuple[ScaledRequest, ...]
    rounds: int
    reuse: Reuse
    tokens_per_s: float
    """What a server without a connector computed when it was asked for much at once."""

    @property
    def distinct_bytes(self) -> int:
        """What a tier of unlimited size would hold at the end: the attention, and a snapshot a prompt."""
        return self.reuse.distinct * TOKEN_BYTES + self.reuse.snapshots * SNAPSHOT_BYTES


@dataclass(slots=True)
class Outcome:
    """What one side has served. ``cpu_s``: of the processor, by the thread that runs the model.

    ``external``: tokens from its tiers; ``by_connector``: the same, for ours.
    """

    side: Side
    parts: list[Part] = field(default_factory=list)
    cpu_s: float = 0.0
    external: int = 0
    by_connector: dict[str, int] = field(default_factory=dict)

    @property
    def first_tokens(self) -> list[float]:
        return [one.first_token_s for part in self.parts for one in part.served]

    @property
    def prompt_tokens(self) -> int:
        return sum(one.prompt_tokens for part in self.parts for one in part.served)

    @property
    def cached_tokens(self) -> int:
        """From vLLM's own cache and from tiers."""
        return sum(one.cached_tokens for part in self.parts for one in part.served)

    @property
    def tokens_per_s(self) -> float:
        """Prompts and answers, while its requests were under way."""
        return sum(part.num_tokens for part in self.parts) / sum(part.seconds for part in self.parts)

    @property
    def errors(self) -> list[str]:
        return [error for part in self.parts for error in part.errors]


COLUMNS = (
    *("side", "restored", "device hits", "of sharable", "first token p50", "p95", "p50'", "p50' of parts", "p95'"),
    *("p95' of parts", "tokens/s", "tokens/s' of parts", "model's CPU s", "CPU s'", "failed"),
)


def rows(outcomes: Sequence[Outcome], plan: Plan) -> Iterator[Sequence[object]]:
    """One row for each side. The others are compared with the first."""
    first = outcomes[0]
    base = [percentile(first.first_tokens, share) for share in (0.5, 0.95)]
    for one in outcomes:
        times = [percentile(one.first_tokens, share) for share in (0.5, 0.95)]
        yield (
            one.side.name,
            f"{one.external:,}",
            f"{one.cached_tokens - one.external:,}",
            f"{one.cached_tokens / max(1, plan.reuse.shared):.0%}",
            *(f"{time * 1000:.0f} ms" for time in times),
            f"{times[0] / base[0]:.2f}",
            ratio(*([part.first_token_s(0.5) for part in each.parts] for each in (one, first))),
            f"{times[1] / base[1]:.2f}",
            ratio(*([part.first_token_s(0.95) for part in each.parts] for each in (one, first))),
            f"{one.tokens_per_s:,.0f}",
            ratio(*([part.num_tokens / part.seconds for part in each.parts] for each in (one, first))),
            f"{one.cpu_s:.1f}",
            f"{one.cpu_s / first.cpu_s:.2f}",
            len(one.errors),
        )


def described(plan: Plan, sizes: Sizes) -> str:
    """What was served, in two lines."""
    last = plan.requests[-1].arrival_s
    return (
        f"{len(plan.requests)} requests over {last:.0f} s in {plan.rounds} parts, {plan.reuse.prompts:,} tokens of "
        f"prompts, of which a cache without a limit could restore {plan.reuse.shared:,}; alone and at once the first "
        f"side served {plan.tokens_per_s:,.0f} tokens/s.\n"
        f"Everything together is {plan.distinct_bytes / 2**20:.0f} MiB: CPU tiers have "
        f"{sizes.cpu_bytes / 2**20:.0f} MiB, our disk tier {sizes.disk_bytes / 2**20:.0f} MiB (the fs tier has no "
        f"limit), vLLM's own cache {sizes.device_blocks} blocks."
    )


def as_json(outcomes: Sequence[Outcome], plan: Plan, sizes: Sizes) -> dict[str, Any]:
    """Every figure of the table, each request's too."""
    return {
        "requests": len(plan.requests),
        "reuse": asdict(plan.reuse),
        "compute_tokens_per_s": plan.tokens_per_s,
        "distinct_bytes": plan.distinct_bytes,
        "sizes": asdict(sizes),
        "sides": [
            {
                "side": asdict(one.side),
                "restored_tokens": one.external,
                "restored_by_connector": one.by_connector,
                "cached_tokens": one.cached_tokens,
                "prompt_tokens": one.prompt_tokens,
                "tokens_per_s": one.tokens_per_s,
                "cpu_s": one.cpu_s,
                "first_token_s": {"p50": percentile(one.first_tokens, 0.5), "p95": percentile(one.first_tokens, 0.95)},
                "parts": [asdict(part) for part in one.parts],
            }
            for one in outcomes
        ],
    }
