# SPDX-License-Identifier: Apache-2.0
"""The line that says at start which children there are."""

from collections.abc import Sequence

from vllm_overlay.multi_connector.children import ChildSpec
from vllm_overlay.multi_connector.settings import ChildSettings, MultiSettings
from vllm_overlay.multi_connector.weights import LoadWeight

_DEFAULT = ChildSettings()


def start_line(settings: MultiSettings, specs: Sequence[ChildSpec]) -> str:
    """``cpu (HybridOffloadConnector, weight 1), disk (..., store off); control file ...``."""
    children = ", ".join(f"{spec.name} ({', '.join(_words(spec))})" for spec in specs)
    control_file = f"; control file {settings.control_file}" if settings.control_file else ""
    return f"{children}{control_file}"


def _words(spec: ChildSpec) -> list[str]:
    own = spec.settings
    words = [spec.cls.__name__, _weight(spec.load_weight)]
    words += [f"{switch} off" for switch in ("load", "store", "promote") if not getattr(own, switch)]
    if own.min_tokens != _DEFAULT.min_tokens:
        words.append(f"min_tokens {own.min_tokens}")
    return words


def _weight(weight: LoadWeight) -> str:
    """A number without needless zeros."""
    return f"weight auto, {weight.number:g} until measured" if weight.is_measured else f"weight {weight.number:g}"
