# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's own tests of what the series touches, on vLLM without and with it, and compares; see --help."""

import argparse
import collections
import os
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm_overlay import VLLM_VERSION
from vllm_overlay.patching import tree
from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.installed import installed_root

REPOSITORY = Path(__file__).resolve().parent.parent
UNIT = "tests/v1/kv_connector/unit"
TESTS = (
    "tests/v1/core",
    "tests/v1/metrics/test_stats.py",
    "tests/v1/worker/test_mamba_utils.py",
    f"{UNIT}/offloading_connector",
    f"{UNIT}/test_cache_pollution_prevention.py",
    f"{UNIT}/test_config.py",
    f"{UNIT}/test_error_propagation.py",
    f"{UNIT}/test_handshake_pp_aggregation.py",
    f"{UNIT}/test_hma_auto_config.py",
    f"{UNIT}/test_invalid_blocks_correctness.py",
    f"{UNIT}/test_kv_connector_lifecycle.py",
    f"{UNIT}/test_kv_load_failure_recovery.py",
    f"{UNIT}/test_multi_connector.py",
    f"{UNIT}/test_output_aggregator.py",
    f"{UNIT}/test_remote_decode_lifecycle.py",
    f"{UNIT}/test_remote_prefill_lifecycle.py",
    f"{UNIT}/test_scheduler_kv_connector_override.py",
)
LEFT_OUT = {
    "tests/v1/core/test_reset_prefix_cache_e2e.py": "serves a model from the Hub",
    "tests/v1/core/test_priority_scheduler_random.py": "reads a multimodal model from the Hub",
    "tests/v1/core/test_scheduler_e2e.py": "serves a model from the Hub",
    "tests/v1/core/prefix_cache/test_hybrid_prefix_cache_hit_rate.py": "serves a model from the Hub",
}
_SPLIT = "patch 0009: the split that it wants to be 0 is the starvation that the patch ends"
_WHOLE = "patch 0002: its connector loads the whole prompt of a model with states, which applies the last token twice"
KNOWN = {
    "tests.v1.core.test_mamba_align_chunk_split::test_internal_checkpoint_split[3602-512-True-0]": _SPLIT,
    "tests.v1.core.prefix_cache.test_partial_prefix_cache_hits"
    "::test_mamba_align_split_when_block_exceeds_scheduling_budget": _SPLIT,
    "tests.v1.core.test_scheduler::test_delayed_kv_connector_free_keeps_scheduler_active": "patch 0003: it puts a "
    "finished request into the scheduler by hand, past the place that notes what the request waits for",
    f"{UNIT.replace('/', '.')}.test_kv_load_failure_recovery"
    "::test_block_level_load_failure_fails_closed_with_multiple_groups": "patch 0006: it wants the RuntimeError",
    f"{UNIT.replace('/', '.')}.test_remote_prefill_lifecycle"
    "::test_async_load_does_not_double_reserve_mamba_spec_blocks[none-128-18]": _WHOLE,
    f"{UNIT.replace('/', '.')}.test_remote_prefill_lifecycle"
    "::test_async_load_does_not_double_reserve_mamba_spec_blocks[align-16-18]": _WHOLE,
}
"""Tests that the series makes fail, and why that is meant."""
REQUIREMENTS = ("tblib", "pytest-asyncio", "pytest-forked")
BUILD_REQUIREMENTS = ("setuptools<81", "setuptools-scm", "setuptools-rust", "wheel", "packaging")
MODELS = {
    "facebook/opt-125m": ("OPTConfig", {}),
    "facebook/opt-350m": ("OPTConfig", {"hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24}),
    "Qwen/Qwen3-0.6B": ("Qwen3Config", {}),
    "Qwen/Qwen1.5-7B": ("Qwen2Config", {"num_key_value_heads": 32}),
    "llava-hf/llava-1.5-7b-hf": ("LlavaConfig", {}),
}
"""Configurations that tests read from the Hub; these have the architecture's defaults and no weights."""

PLUGIN = "no_global_cleanup"
PLUGIN_TEXT = """\
import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.skip_global_cleanup)
"""
"""vLLM's own mark for tests without a GPU: else most of the time goes into what is cleaned up after each."""

Outcomes = dict[str, str]


def run(command: Sequence[str | Path], what: str, **options: object) -> None:
    """Runs a command that must succeed. Raises PatchError with the end of what it said."""
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise PatchError(f"{what} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def pip_install(directory: Path, *requirements: str) -> None:
    """Installs into a directory of its own, once."""
    if directory.is_dir():
        return
    fresh = directory.with_suffix(".part")
    shutil.rmtree(fresh, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", fresh, *requirements]
    run(pip, f"installing {', '.join(requirements)}")
    fresh.rename(directory)


def prepare_site(work: Path) -> None:
    """What the tests need besides the overlay's environment, in a directory for ``PYTHONPATH``."""
    pip_install(work / "site", "--no-deps", *REQUIREMENTS)
    (work / "site" / f"{PLUGIN}.py").write_text(PLUGIN_TEXT)


def download(work: Path) -> Path:
    """The source distribution, by pip: it builds nothing but asks the build backend for the metadata."""
    archive = work / f"vllm-{VLLM_VERSION}.tar.gz"
    if not archive.is_file():
        pip_install(work / "build", *BUILD_REQUIREMENTS)
        environment = {
            **os.environ,
            "PYTHONPATH": str(work / "build"),
            "VLLM_TARGET_DEVICE": "empty",
            "VLLM_VERSION_OVERRIDE": VLLM_VERSION,
        }
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        pip += ["--no-binary", "vllm", "--dest", str(work), f"vllm=={VLLM_VERSION}"]
        run(pip, "downloading vLLM's source distribution", env=environment)
    return archive


def take_tests(source: Path, work: Path) -> None:
    """Puts vLLM's tests/ into ``work``, from an unpacked source or its archive, where no vllm/ lies beside them."""
    shutil.rmtree(work / "tests", ignore_errors=True)
    if source.is_dir():
        shutil.copytree(source / "tests", work / "tests")
        return
    with tarfile.open(source) as archive:
        members = [member for member in archive if "/tests/" in member.name and member.name.split("/")[1] == "tests"]
        for member in members:
            member.name = member.name.partition("/")[2]
        archive.extractall(work, members, filter="data")


def link(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:  # another file system
        shutil.copy2(source, destination)


def make_unpatched(work: Path) -> Path:
    """A copy of the installed vLLM, hard-linked, with the series taken back."""
    installed = installed_root()
    if installed is None or not tree.status(installed).is_applied:
        raise PatchError("the installed vLLM lacks the series: run `make setup`")
    root = work / "unpatched"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(installed / "vllm", root / "vllm", copy_function=link)
    tree.reverse(root)
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
    """Outcome of each test on the vLLM in ``root``, or on the installed one."""
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
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "300", "-p", "no:cacheprovider"]
    command += [
        "-p",
        PLUGIN,
        "-n",
        str(jobs),
        "--dist",
        "loadfile",
        f"--junitxml={report}",
        f"--rootdir={work}",
        "-c",
        os.devnull,
    ]
    command += [f"--ignore={path}" for path in LEFT_OUT]
    with open(work / f"{name}.log", "w") as log:
        subprocess.run([*command, *chosen], cwd=work, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if not report.is_file():
        raise PatchError(f"pytest wrote no report: see {work / f'{name}.log'}")
    return {
        f"{case.get('classname')}::{case.get('name')}": outcome_of(case)
        for case in ElementTree.parse(report).iter("testcase")
    }


def outcome_of(case: ElementTree.Element) -> str:
    for child, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if case.find(child) is not None:
            return outcome
    return "passed"


def compare(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Tests that pass only without the series, but for the KNOWN ones; and KNOWN ones that pass with it after all."""
    worse = [test for test, outcome in before.items() if outcome == "passed" and after.get(test) != "passed"]
    stale = [test for test in KNOWN if before.get(test) == after.get(test) == "passed"]
    return [test for test in worse if test not in KNOWN], stale


def table(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """A row for each test module: how many passed, failed, were skipped, before and after."""
    rows: dict[str, list[collections.Counter[str]]] = {}
    for column, outcomes in enumerate((before, after)):
        for test, outcome in outcomes.items():
            module = test.partition("::")[0].rpartition(".Test")[0] or test.partition("::")[0]
            rows.setdefault(module, [collections.Counter(), collections.Counter()])[column][outcome] += 1
    lines = ["| tests | before | after |", "| --- | --- | --- |"]
    total = [collections.Counter[str](), collections.Counter[str]()]
    for module, counts in sorted(rows.items()):
        lines.append(f"| {module} | {_words(counts[0])} | {_words(counts[1])} |")
        total = [one + other for one, other in zip(total, counts, strict=True)]
    return "\n".join([*lines, f"| all | {_words(total[0])} | {_words(total[1])} |"])


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[word]} {word}" for word in ("passed", "failed", "skipped") if counts.get(word))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=f"Runs vLLM {VLLM_VERSION}'s own tests of what the patch series touches, without a GPU and without "
        "the Hub, on a copy of the installed vLLM without the series and on the installed one. What fails on both "
        "needs a GPU, weights or a package that is not here; what fails only with the series is listed.",
        epilog="exit status: 0 nothing got worse but for the known exceptions, 1 something did, 2 wrong usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--source", type=Path, help="source distribution, archive or unpacked; default: pip downloads it"
    )
    parser.add_argument("--work", type=Path, default=REPOSITORY / ".upstream", help="default: .upstream")
    parser.add_argument("--jobs", type=int, default=2, help="test files at a time (default: 2)")
    parser.add_argument("tests", nargs="*", default=TESTS, help="paths in the source; default: the set in this file")
    arguments = parser.parse_args(argv)
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        take_tests(arguments.source or download(work), work)
        prepare_site(work)
        make_models(work / "hf")
        unpatched = make_unpatched(work)
        before = run_tests(work, "before", unpatched, arguments.tests, arguments.jobs)
        after = run_tests(work, "after", None, arguments.tests, arguments.jobs)
    except PatchError as error:
        print(error, file=sys.stderr)
        return 1
    worse, stale = compare(before, after)
    print(table(before, after))
    for test, reason in KNOWN.items():
        print(f"\nknown: {test}\n  {reason}")
    for test in worse:
        print(f"\nworse: {test}: {before[test]} before, {after.get(test, 'not run')} after")
    for test in stale:
        print(f"\nno exception any more: {test} passes with the series")
    return 1 if worse or stale else 0


if __name__ == "__main__":
    sys.exit(main())
