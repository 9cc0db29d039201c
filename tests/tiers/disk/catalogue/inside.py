# SPDX-License-Identifier: Apache-2.0
"""What a catalogue keeps to itself. Only here do its tests read or set it."""

import contextlib
import sqlite3

from vllm_overlay.tiers.disk.catalogue import Catalogue
from vllm_overlay.tiers.disk.catalogue.connection import LONG_CALLS


def reading(catalogue: Catalogue) -> contextlib.AbstractContextManager[sqlite3.Connection]:
    """A transaction that may read every row."""
    return catalogue._connection.reading(LONG_CALLS)


def writing(catalogue: Catalogue) -> contextlib.AbstractContextManager[sqlite3.Connection]:
    """A transaction in which a test does what no call does."""
    return catalogue._connection.writing()
