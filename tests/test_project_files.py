# SPDX-License-Identifier: Apache-2.0
"""Examples, workflows, templates and container files name what is there; their configurations are accepted."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.python_path import REPOSITORY
from tests.transfer_config import accepted_tiers
from vllm_overlay.config import parse_bytes

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.json"))
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_accepted(path: Path) -> None:
    assert accepted_tiers(json.loads(path.read_text()))


def test_kubernetes_serves_with_memory_and_disk_that_it_mounts() -> None:
    claim, deployment = yaml.safe_load_all((REPOSITORY / "examples" / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    (text,) = (each for each in container["args"] if each.startswith("--kv-transfer-config="))
    config = json.loads(text.removeprefix("--kv-transfer-config="))
    assert accepted_tiers(config) == ["hybrid_disk"]
    memory = config["kv_connector_extra_config"]["cpu_bytes_to_use"]
    (disk,) = config["kv_connector_extra_config"]["secondary_tiers"]
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert Path(disk["root"]).is_relative_to(mounts["kv"])
    assert mounts["shm"] == Path("/dev/shm")
    limit = container["resources"]["limits"]["memory"]
    assert memory < in_bytes(volumes["shm"]["emptyDir"]["sizeLimit"]) < in_bytes(limit)
    assert parse_bytes(disk["capacity_bytes"], "") < in_bytes(claim["spec"]["resources"]["requests"]["storage"])
    assert volumes["kv"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    port = container["ports"][0]["containerPort"]
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(port)
    shutdown = next(int(each.split("=")[1]) for each in container["args"] if each.startswith("--shutdown-timeout="))
    assert pod["spec"]["terminationGracePeriodSeconds"] > shutdown


def in_bytes(quantity: str) -> int:
    return parse_bytes(f"{quantity}B", quantity)


def test_the_image_has_the_package_and_the_series_and_nothing_else() -> None:
    lines = (REPOSITORY / "docker" / "Dockerfile").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]
    assert [line.split()[0] for line in commands] == ["ARG", "FROM", "COPY", "RUN"]
    version = (REPOSITORY / "patches" / "vllm_version.txt").read_text().strip()
    assert commands[0].endswith(f":v{version}")
    # --system would pass over the virtual environment that vLLM's CPU image has.
    assert '--python "$(command -v python3)"' in commands[3]
    script = re.search(r"python3 /opt/vllm-overlay/(\S+) --installed", commands[3])
    assert script and (REPOSITORY / script[1]).is_file()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_and_files_that_are_there(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    runs = []
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 120
        targets = job.get("strategy", {}).get("matrix", {}).get("target", [])
        assert set(targets) <= TARGETS
        runs += [step["run"] for step in job["steps"] if "run" in step]
    named = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", "\n".join(runs)))
    assert named <= TARGETS
    assert runs
    assert all((REPOSITORY / script).is_file() for script in re.findall(r"python (tools/\S+)", "\n".join(runs)))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_it_must(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    assert all(field["attributes"]["label"] for field in form["body"])


def test_pre_commit_runs_what_make_lint_runs() -> None:
    (repo,) = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    entries = {hook["entry"].replace(".venv/bin/", "").replace(" --fix", "") for hook in repo["hooks"]}
    lint = (REPOSITORY / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    assert all(entry in lint.replace("--check ", "") for entry in entries)
    assert len(entries) == lint.count("$(BIN)/")


def test_every_example_is_in_its_page() -> None:
    page = (REPOSITORY / "examples" / "README.md").read_text()
    files = [path.name for path in (REPOSITORY / "examples").iterdir() if path.name != "README.md"]
    assert [name for name in files if f"[{name}]({name})" not in page] == []
