# SPDX-License-Identifier: Apache-2.0
"""What tests of the disk tier share."""

import pytest

from vllm_overlay.common import rate_limited_log


@pytest.fixture
def all_logged(monkeypatch, caplog):
    """Every warning, however often it was given before."""
    monkeypatch.setattr(rate_limited_log, "INTERVAL_S", 0.0)
    return caplog
