# SPDX-License-Identifier: Apache-2.0
"""Settings that cannot work are refused with one sentence that names them and something that works."""

from typing import Any

import pytest

from vllm_overlay.config import GIB, MIB, ConfigError, as_size, parse_bytes
from vllm_overlay.tiers.disk.settings import DiskTierSettings
from vllm_overlay.tiers.factory import tier_spec

CPU = {"tier": "cpu"}
DISK = {"tier": "disk", "root": "/tmp/root"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, 'tier is not set: set kv_connector_extra_config.tier to "cpu" or "disk"'),
        ({"tier": "gpu"}, 'tier=\'gpu\' is not known: set it to "cpu" or "disk", or to "module:Class"'),
        ({"tier": []}, "tier=[] is not known: set it to"),
        ({**CPU, "capacity": 1}, "unknown setting 'capacity' of the cpu tier: it takes tier, name, "),
        ({**CPU, "capacity": 1}, "; did you mean capacity_bytes?"),
        ({**CPU, "root": "/tmp"}, "unknown setting 'root' of the cpu tier"),
        ({"tier": "dsk", "root": "/tmp/root"}, 'or to "module:Class"; did you mean disk?'),
        (
            {"tier": "disk"},
            'root of the disk tier is not set: set it to a string that is not empty, such as "/var/cache/vllm-kv"',
        ),
        ({**DISK, "root": ""}, "root='' of the disk tier must be a string that is not empty, such as"),
        ({**DISK, "root": 3}, "root=3 of the disk tier must be a string that is not empty, such as"),
        (
            {**CPU, "load_weight": -1},
            "load_weight=-1 of connector 'cpu' must be \"auto\" or a number of at least 0, such as 0.8",
        ),
        ({**CPU, "load_weight": "much"}, "load_weight='much' of connector 'cpu' must be \"auto\" or a number"),
        ({**CPU, "load_weight": True}, "load_weight=True of connector 'cpu' must be \"auto\" or a number"),
        ({**CPU, "load_weight": float("nan")}, "load_weight=nan of connector 'cpu' must be \"auto\" or a number"),
        ({**CPU, "capacity_bytes": "4 GX"}, "capacity_bytes='4 GX' is not a size: give bytes or a string such as"),
        ({**CPU, "capacity_bytes": -1}, "capacity_bytes=-1 is not a size"),
        ({**CPU, "capacity_bytes": True}, "capacity_bytes=True is not a size: give bytes or a string such as"),
        ({**CPU, "capacity_bytes": 1.5}, "capacity_bytes=1.5 is not a size"),
        ({**DISK, "staging_bytes": "many"}, "staging_bytes='many' is not a size"),
        ({**DISK, "read_threads": 0}, "read_threads=0 of the disk tier must be a whole number from 1 to 64, such as 4"),
        ({**DISK, "direct_io": "on"}, 'direct_io=\'on\' of the disk tier must be "auto" or "off", such as "auto"'),
        ({**CPU, "load_failure_policy": "ignore"}, 'must be "fail" or "recompute", such as "recompute"'),
        ({**CPU, "max_load_attempts": 0}, "max_load_attempts=0 of the cpu tier must be a whole number of at least 1"),
        ({**CPU, "load_timeout_s": 0}, "load_timeout_s=0 of the cpu tier must be a number above 0, such as 30.0"),
        (
            {**CPU, "eviction_policy": "mru"},
            'eviction_policy=\'mru\' is not known: set it to "lru" or "learned", or to',
        ),
        ({**CPU, "hybrid_chunk_size": 1.5}, 'must be a whole number above 0 or "auto", such as "auto"'),
        ({**CPU, "hybrid_chunk_size": 0}, "hybrid_chunk_size=0 of the cpu tier must be"),
        ({**CPU, "hybrid_chunk_size": "atuo"}, "; did you mean auto?"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        tier_spec(settings)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [(0, 0), (4096, 4096), ("4096", 4096), ("4 GiB", 4 * GIB), ("1.5MiB", 3 * MIB // 2), (" 2 B ", 2)],
)
def test_sizes_are_bytes_or_words(value: object, num_bytes: int) -> None:
    assert parse_bytes(value, "capacity_bytes") == num_bytes


def test_what_is_not_given_has_its_default_and_sizes_become_numbers() -> None:
    settings = tier_spec({**DISK, "staging_bytes": "1 MiB"}).settings
    assert isinstance(settings, DiskTierSettings)
    assert (settings.name, settings.capacity_bytes, settings.staging_bytes) == ("disk", 20 * GIB, MIB)


@pytest.mark.parametrize(
    ("num_bytes", "word"),
    [(1 << 40, "1TiB"), (15 << 39, "7680GiB"), (20 << 40, "20TiB"), (GIB - 1, "1023MiB"), (512, "512B"), (0, "0B")],
)
def test_a_size_that_is_said_can_be_given_back(num_bytes: int, word: str) -> None:
    assert as_size(num_bytes) == word
    assert parse_bytes(word, "--cpu") <= num_bytes
