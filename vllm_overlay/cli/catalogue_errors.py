# SPDX-License-Identifier: Apache-2.0
"""What the errors of a catalogue say to an operator."""

import contextlib
from collections.abc import Iterator

from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.catalogue import Busy, CatalogueError, Damaged, Superseded


@contextlib.contextmanager
def catalogue_errors_explained(root: str) -> Iterator[None]:
    """Raises ConfigError, with what to do, in place of CatalogueError."""
    try:
        yield
    except CatalogueError as error:
        raise ConfigError(f"the catalogue of {root} {_explain(error, root)}") from error


def _explain(error: CatalogueError, root: str) -> str:
    match error:
        case Damaged():
            return f"is damaged ({error}): run `vllm-overlay fsck --repair {root}`"
        case Busy():
            return f"is in use ({error}): try again, or end the process if it is stopped"
        case Superseded():
            return f"was replaced meanwhile ({error}): run this again"
        case _:
            return f"cannot be used now: {error}"
