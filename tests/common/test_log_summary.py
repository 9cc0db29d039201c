# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm_overlay.common.log_summary import hit_rate, in_bytes, percent, present


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, ""),
        (1, "1.0 B"),
        (1023, "1023.0 B"),
        (1024, "1.0 KiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 40, "1.0 TiB"),
        (1 << 52, "4096.0 TiB"),
    ],
)
def test_bytes_have_a_readable_unit(num_bytes: int, text: str) -> None:
    assert in_bytes(num_bytes) == text


def test_what_was_not_asked_has_no_share() -> None:
    assert (percent(0, 0), percent(1, 3), hit_rate(0, 0), hit_rate(1, 4)) == ("", "33.3%", "", "25.0% of 4 tokens")


def test_what_is_zero_is_not_said() -> None:
    assert present(failed_loads=0, hit="", dropped_stores=2) == {"dropped stores": 2}
