# SPDX-License-Identifier: Apache-2.0
"""Workloads from a seed."""
from bench.trace import TraceRequest
WORKLOADS: tuple[str, ...] = ()
def generate(name: str, seed: int) -> list[TraceRequest]:
    raise KeyError(name)
