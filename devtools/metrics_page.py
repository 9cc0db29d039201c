# SPDX-License-Identifier: Apache-2.0
"""The lists of docs/metrics.md, from the rows of the metrics and the reasons' docstrings.

python -m devtools.metrics_page    # writes them; tests/test_metrics.py says if they are stale
"""

import ast
import itertools
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from devtools.docs.generated import with_parts
from vllm_overlay import metrics
from vllm_overlay.common import reasons
from vllm_overlay.common.reasons import GROUP_KINDS, Reason
from vllm_overlay.metrics import HYBRID_OFFLOAD, MULTI_CONNECTOR, Metric, Source

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
METRICS = (*HYBRID_OFFLOAD.values(), *MULTI_CONNECTOR.values())
_SOURCES = Path(metrics.__file__)
E = TypeVar("E", bound=StrEnum)


def lists() -> dict[str, str]:
    return {
        "tier": _metrics(HYBRID_OFFLOAD),
        "child": _metrics(MULTI_CONNECTOR),
        "sources": "".join(f"- `{source}`: {text}\n" for source, text in meanings_of(_SOURCES, Source).items()),
        "lost_tokens": _reasons(reasons.LOST_TOKENS),
        "lookup_limits": ", ".join(f"`{reason}`" for reason in Reason if reason in reasons.LOOKUP_LIMITS) + ".\n",
        "both": _reasons(reasons.DROPPED_STORES & reasons.FAILED_LOADS),
        "stores": _reasons(reasons.DROPPED_STORES - reasons.FAILED_LOADS),
        "loads": _reasons(reasons.FAILED_LOADS - reasons.DROPPED_STORES),
        "ignored_offers": _reasons(reasons.IGNORED_OFFERS),
    }


def meanings_of(path: Path, enum: type[E]) -> dict[E, str]:
    """The docstring of each member, which stands in the source alone."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    body = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == enum.__name__).body
    found = {}
    for member, text in itertools.pairwise(body):
        if isinstance(member, ast.Assign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(member.targets[0], ast.Name) and isinstance(text.value.value, str)
            found[enum[member.targets[0].id]] = " ".join(text.value.value.split()).replace("``", "`")
    return found


def _metrics(family: Mapping[str, Metric]) -> str:
    return "".join(f"- `{each.name}{_labels(each)}` ({each.kind}): {each.documentation}\n" for each in family.values())


def _labels(metric: Metric) -> str:
    """Those beside ``connector``, as a query names them."""
    return f"{{{', '.join(metric.labels[1:])}}}" if metric.labels[1:] else ""


def _reasons(some: Collection[Reason]) -> str:
    """In the order of the enum, each with the kind of group that it speaks of."""
    means = meanings_of(Path(reasons.__file__), Reason)
    kinds = {reason: f" (`{kind}`)" for reason, kind in GROUP_KINDS.items()}
    return "".join(f"- `{each}`{kinds.get(each, '')}: {text}\n" for each, text in means.items() if each in some)


if __name__ == "__main__":
    PAGE.write_text(with_parts(PAGE.read_text(encoding="utf-8"), lists()), encoding="utf-8")
