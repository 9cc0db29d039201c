# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that run an engine."""

import pytest

from tests.engine.states import STATES, States


@pytest.fixture(scope="module", params=STATES, ids=str)
def states(request: pytest.FixtureRequest) -> States:
    """Each dtype that states can have: what asks for this runs with both, on every machine."""
    found: States = request.param
    return found
