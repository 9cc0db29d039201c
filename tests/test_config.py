# SPDX-License-Identifier: Apache-2.0
"""Settings that cannot work are refused with one sentence that names them and something that works."""

from typing import Any

import pytest

from vllm_overlay.config import GIB, MIB, ConfigError, parse_bytes
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
        ({**CPU, "capacity": 1}, "unknown setting 'capacity' of the cpu tier: it takes capacity_bytes, "),
        ({**CPU, "root": "/tmp"}, "unknown setting 'root' of the cpu tier"),
        ({"tier": "disk"}, "missing required field `root`"),
        ({**DISK, "root": 3}, "Expected `str`, got `int` - at `$.root`"),
        ({**CPU, "load_weight": -1}, "load_weight=-1 of connector 'cpu' must be a number of at least 0, such as 1.0"),
        ({**CPU, "load_weight": "2"}, "load_weight='2' of connector 'cpu' must be a number"),
        ({**CPU, "load_weight": True}, "load_weight=True of connector 'cpu' must be a number"),
        ({**CPU, "load_weight": float("nan")}, "load_weight=nan of connector 'cpu' must be a number"),
        ({**CPU, "capacity_bytes": "4 GB"}, "capacity_bytes='4 GB' is not a size: give bytes or a string such as"),
        ({**CPU, "capacity_bytes": -1}, "capacity_bytes=-1 is not a size"),
        ({**CPU, "capacity_bytes": True}, "capacity_bytes"),
        ({**DISK, "staging_bytes": "many"}, "staging_bytes='many' is not a size"),
        ({**DISK, "read_threads": 0}, "Expected `int` >= 1 - at `$.read_threads`"),
        ({**DISK, "direct_io": "on"}, "Invalid enum value 'on' - at `$.direct_io`"),
        ({**CPU, "load_failure_policy": "ignore"}, "Invalid enum value 'ignore' - at `$.load_failure_policy`"),
        ({**CPU, "max_load_attempts": 0}, "Expected `int` >= 1 - at `$.max_load_attempts`"),
        ({**CPU, "load_timeout_s": 0}, "Expected `float` > 0.0 - at `$.load_timeout_s`"),
        ({**CPU, "eviction_policy": "mru"}, "eviction_policy='mru' is not known: set it to \"lru\", or to"),
        ({**CPU, "hybrid_chunk_size": 1.5}, "at `$.hybrid_chunk_size`"),
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
