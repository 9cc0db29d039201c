# SPDX-License-Identifier: Apache-2.0
"""The series as it lies in patches/."""

import pytest

from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.series import load


def test_a_series_that_does_not_match_its_checksums_is_refused(series):
    patch = series.directory / "0002-second.patch"
    patch.write_text(patch.read_text().replace("a change", "another change"))
    with pytest.raises(PatchError, match=r"checksums\.json is of another series"):
        load(series.directory)
