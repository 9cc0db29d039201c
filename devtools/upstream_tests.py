# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's own tests of what the series touches, on vLLM without and with it, and compares; see --help."""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

from devtools.upstream_set import BUILD_REQUIREMENTS, KNOWN, LEFT_OUT, MODELS, REQUIREMENTS, TESTS
from vllm_overlay import VLLM_VERSION
from vllm_overlay.patching import tree
from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.installed import installed_root
from vllm_overlay.patching.replace import replace_files

PLUGIN = "cheap_cleanup"
PLUGIN_TEXT = """\
import sys

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.skip_global_cleanup)


@pytest.fixture(autouse=True)
def end_process_groups():
    yield
    state = sys.modules.get("vllm.distributed.parallel_state")
    if state and (state.torch.distributed.is_initialized() or state.model_parallel_is_initialized()):
        state.cleanup_dist_env_and_memory()
"""
"""Cleans up after a test only what is there: vLLM's conftest.py cleans up after each, which takes most of the time."""

TAKEN = ("tests", "examples")
LIMIT_S, TIMEOUT_S = 3600, 120
"""For one side, and for one test."""

Outcomes = dict[str, str]


def run(command: Sequence[str | Path], what: str, **options: object) -> None:
    """Runs a command that must succeed. Raises PatchError with the end of what it said."""
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise PatchError(f"{what} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def pip_install(directory: Path, *requirements: str) -> None:
    """Installs into a directory of its own, once for the same requirements."""
    stamp = directory / "requirements.txt"
    if stamp.is_file() and stamp.read_text().splitlines() == list(requirements):
        return
    shutil.rmtree(directory, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(directory), *requirements]
    run(pip, f"installing {', '.join(requirements)}")
    stamp.write_text("\n".join(requirements))


def prepare_site(work: Path) -> None:
    """What the tests need besides the overlay's environment, in a directory for ``PYTHONPATH``."""
    pip_install(work / "site", "--no-deps", *REQUIREMENTS)
    (work / "site" / f"{PLUGIN}.py").write_text(PLUGIN_TEXT)


def download(work: Path) -> Path:
    """The source distribution, by pip: it builds nothing but asks the build backend for the metadata."""
    archive = work / f"vllm-{VLLM_VERSION}.tar.gz"
    if not archive.is_file():
        pip_install(work / "build", *BUILD_REQUIREMENTS)
        of_vllm = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VLLM_VERSION}
        environment = {**os.environ, **of_vllm, "PYTHONPATH": str(work / "build")}
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        pip += ["--no-binary", "vllm", "--dest", str(work), f"vllm=={VLLM_VERSION}"]
        run(pip, "downloading vLLM's source distribution", env=environment)
    return archive


def take_tests(source: Path, work: Path) -> None:
    """Puts vLLM's tests, and the examples that they import, into ``work``, where no vllm/ lies beside them.

    ``source``: an unpacked source distribution, or its archive.
    """
    for name in TAKEN:
        shutil.rmtree(work / name, ignore_errors=True)
        if (source / name).is_dir():
            shutil.copytree(source / name, work / name)
    if source.is_dir():
        return
    with tarfile.open(source) as archive:
        members = [member for member in archive if member.name.split("/")[1:2] in ([name] for name in TAKEN)]
        for member in members:
            member.name = member.name.partition("/")[2]
        archive.extractall(work, members, filter="data")


def link(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:  # another file system
        shutil.copy2(source, destination)


def make_unpatched(work: Path) -> Path:
    """A copy of the installed vLLM, hard-linked, with vLLM's own files."""
    installed = installed_root()
    if installed is None or not tree.status(installed).is_applied:
        raise PatchError("the installed vLLM lacks the series: run `make setup`")
    root = work / "unpatched"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(installed / "vllm", root / "vllm", copy_function=link)
    replace_files(root, tree.originals(installed))
    return root


def make_models(home: Path) -> None:
    """An offline cache of the Hub with configurations only."""
    import transformers

    for name, (kind, settings) in MODELS.items():
        model = home / "hub" / f"models--{name.replace('/', '--')}"
        (model / "refs").mkdir(parents=True, exist_ok=True)
        (model / "refs" / "main").write_text("0")
        # Without a dtype vLLM asks the Hub for that of the weights, several times.
        configuration = getattr(transformers, kind)(dtype="float16", **settings)
        configuration.architectures = [kind.replace("Config", "ForCausalLM")]
        if kind == "LlavaConfig":
            configuration.architectures = ["LlavaForConditionalGeneration"]
        configuration.save_pretrained(model / "snapshots" / "0")


def run_tests(work: Path, name: str, root: Path | None, chosen: Sequence[str], jobs: int) -> Outcomes:
    """Outcome of each test on the vLLM in ``root``, or on the installed one. ``jobs`` 0: in one process."""
    report = work / f"{name}.xml"
    report.unlink(missing_ok=True)
    paths = [str(path) for path in (root, work / "site", os.environ.get("PYTHONPATH")) if path]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HOME": str(work / "hf"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    # Python's own tracebacks: pytest's fail on a deep recursion, and end the worker process with all its tests.
    command = [sys.executable, "-m", "pytest", "-q", "--tb=native", f"--timeout={TIMEOUT_S}", "-p", "no:cacheprovider"]
    command += ["-p", PLUGIN, f"--numprocesses={jobs}", "--dist=loadfile", f"--junitxml={report}"]
    command += [f"--rootdir={work}", "-c", os.devnull, *(f"--ignore={path}" for path in LEFT_OUT)]
    with open(work / f"{name}.log", "w") as log:
        run_logged([*command, *chosen], log, cwd=work, env=environment)
    if not report.is_file():
        raise PatchError(f"pytest wrote no report: see {work / f'{name}.log'}")
    return {name_of(case): outcome_of(case) for case in ElementTree.parse(report).iter("testcase")}


def run_logged(command: Sequence[str | Path], log: TextIO, **options: object) -> None:
    """Runs a command, however it ends. Raises PatchError when it does not: pytest may wait for a dead worker."""
    try:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_S, **options)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired as error:
        raise PatchError(f"pytest did not end in {LIMIT_S} s: see {log.name}") from error


def name_of(case: ElementTree.Element) -> str:
    """module::test, or the module alone where it could not be imported."""
    module, test = case.get("classname"), case.get("name")
    return f"{module}::{test}" if module else str(test)


def file_of(test: str, work: Path) -> str:
    """The file of a test, which may be in a class: the path relative to ``work``."""
    parts = test.partition("::")[0].split(".")
    for count in range(len(parts), 0, -1):
        path = Path(*parts[:count]).with_suffix(".py")
        if (work / path).is_file():
            return str(path)
    raise PatchError(f"{test} is in no file of {work}")


def run_alone(work: Path, sides: Mapping[str, Path | None], files: Sequence[str], jobs: int) -> dict[str, Outcomes]:
    """Each of these files in a process of its own, on each side: the outcomes of each side."""

    def run_one(side: str, number: int) -> Outcomes:
        return run_tests(work, f"{side}-alone-{number}", sides[side], [files[number]], jobs=0)

    with ThreadPoolExecutor(jobs) as threads:
        tasks = {side: [threads.submit(run_one, side, number) for number in range(len(files))] for side in sides}
        return {side: {test: found for task in tasks[side] for test, found in task.result().items()} for side in sides}


def outcome_of(case: ElementTree.Element) -> str:
    outcomes = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    return next((outcome for child, outcome in outcomes.items() if case.find(child) is not None), "passed")


def compare(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Tests that pass only without the series, but for the KNOWN ones; and KNOWN ones that pass with it after all."""
    worse = [test for test, outcome in before.items() if outcome == "passed" and after.get(test) != "passed"]
    stale = [test for test in KNOWN if before.get(test) == after.get(test) == "passed"]
    return [test for test in worse if test not in KNOWN], stale


def counted(outcomes: Mapping[str, str]) -> str:
    counts = Counter(outcomes.values())
    return ", ".join(f"{counts[word]} {word}" for word in ("passed", "failed", "skipped") if counts[word])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=f"Runs vLLM {VLLM_VERSION}'s own tests of what the patch series touches, without a GPU and without "
        "the Hub, on a copy of the installed vLLM without the series and on the installed one. What fails on both "
        "needs a GPU, weights or a package that is not here; what fails only with the series is listed.",
        epilog="exit status: 0 nothing got worse but for the known exceptions, 1 something did, 2 wrong usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--source", type=Path, help="source distribution, packed or not; default: pip downloads it")
    parser.add_argument("--work", type=Path, default=Path(".upstream"), help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="test files at a time (default: 2)")
    parser.add_argument("tests", nargs="*", default=TESTS, help="paths in the source; default: the set in this file")
    arguments = parser.parse_args(argv)
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        take_tests(arguments.source or download(work), work)
        check_set(work)
        prepare_site(work)
        make_models(work / "hf")
        sides = {"before": make_unpatched(work), "after": None}
        before, after = (run_tests(work, *side, arguments.tests, arguments.jobs) for side in sides.items())
        if suspects := compare(before, after)[0]:
            files = sorted({file_of(test, work) for test in suspects})
            print(f"{len(suspects)} tests look worse: their files again, each alone, on both sides", flush=True)
            alone = run_alone(work, sides, files, arguments.jobs)
            before, after = before | alone["before"], after | alone["after"]
    except PatchError as error:
        print(error, file=sys.stderr)
        return 1
    return say(before, after)


def check_set(work: Path) -> None:
    """Raises PatchError if the set of this tool names what the source does not have."""
    if gone := [path for path in (*TESTS, *LEFT_OUT) if not (work / path).exists()]:
        raise PatchError(f"vLLM's source has no {', '.join(gone)}: correct devtools/upstream_set.py")


def say(before: Mapping[str, str], after: Mapping[str, str]) -> int:
    worse, stale = compare(before, after)
    print(f"\nbefore: {counted(before)}\nafter: {counted(after)}")
    for test, reason in KNOWN.items():
        print(f"\nknown: {test}\n  {reason}")
    for test in worse:
        print(f"\nworse: {test}: {before[test]} before, {after.get(test, 'not run')} after")
    for test in stale:
        print(f"\nno exception any more: {test} passes with the series")
    return 1 if worse or stale else 0


if __name__ == "__main__":
    sys.exit(main())
