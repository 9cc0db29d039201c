# SPDX-License-Identifier: Apache-2.0
"""A warning that comes again and again is said once a minute."""

import logging

from vllm_overlay.common.rate_limited_log import RateLimitedLog


def test_warnings_of_one_topic_are_counted_and_not_repeated(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    log = RateLimitedLog(logging.getLogger("test"))
    for _ in range(5):
        log.warning("a", "it failed: %s", "x")
    log.warning("b", "other")
    now[0] += 61
    log.warning("a", "it failed: %s", "y")
    assert caplog.messages == ["it failed: x", "other", "it failed: y (4 more like this since)"]
