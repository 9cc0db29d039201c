# SPDX-License-Identifier: Apache-2.0
"""The MultiConnector's control file, in a running engine."""

import json
import os
from pathlib import Path
from typing import Any

from tests.engine.client import Engine
from tests.waiting import until

_SEEN = "the children's switches are "


def switch(engine: Engine, control: Path, switches: dict[str, dict[str, Any]] | None) -> None:
    """Without ``switches`` there is no file. It is looked at once a second, in engine steps; the log says that."""
    said = engine.log.count(_SEEN)
    if switches is None:
        control.unlink()
    else:
        fresh = control.with_suffix(".new")
        fresh.write_text(json.dumps(switches))
        os.replace(fresh, control)
    until(lambda: engine.generate([1], 1) and engine.log.count(_SEEN) > said, "a look at it")
