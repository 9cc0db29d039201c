# SPDX-License-Identifier: Apache-2.0
"""What a disk does that is really full, out of files, read-only or unmounted: the tests of ``small_disk.py``."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.mounts import IN_NAMESPACE, why_not
from tests.tiers.disk import small_disk

REPOSITORY = Path(__file__).parents[3]
NAMES = [name for name in vars(small_disk) if name.startswith("test_")]

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no small file system can be mounted: {why_not()}")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Why each of them failed, or an empty string. One process in a mount namespace of its own runs them all."""
    directory = tmp_path_factory.mktemp("small-disk")
    report = directory / "report.xml"
    command = [sys.executable, "-m", "pytest", small_disk.__file__, f"--junitxml={report}", f"--basetemp={directory}/t"]
    done = subprocess.run(
        [*IN_NAMESPACE, *command, "-p", "no:cacheprovider"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert report.exists(), done.stdout + done.stderr
    cases = ElementTree.parse(report).iter("testcase")
    return {case.get("name", ""): "\n".join(part.text or "" for part in case) for case in cases}


@pytest.mark.parametrize("name", NAMES)
def test_in_a_namespace_of_its_own(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == "", outcomes[name]
