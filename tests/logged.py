# SPDX-License-Identifier: Apache-2.0
"""What a part of the product has logged: a thread of an earlier test may still have something to say elsewhere."""

import logging
from types import ModuleType

import pytest


def logged_by(module: ModuleType, caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What this module's logger has said in this test."""
    return [record for record in caplog.records if record.name == module.__name__]
