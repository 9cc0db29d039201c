# SPDX-License-Identifier: Apache-2.0
"""Trees that may not be written: --check and --status need no write, and the others say what hinders them."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mounts import IN_NAMESPACE, why_not
from tests.patches.trees import contents, make_unpatched
from vllm_overlay.patching.series import load

TOOL = Path(__file__).resolve().parents[2] / "tools" / "apply_patches.py"
WITHOUT_OVERRIDE = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
"""What a command is begun with so that permission bits bind root, too."""


@pytest.fixture
def checkout(tmp_path):
    return make_unpatched(tmp_path / "checkout")


def run(begin, tree, *arguments):
    command = [*begin, sys.executable, "-B", str(TOOL), "--target", str(tree), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def on_read_only_mount(checkout):
    """What a command is begun with to find the tree on a read-only file system."""
    if why_not():
        pytest.skip(f"no mounts here: {why_not()}")
    tree = shlex.quote(str(checkout))
    mount = f"mount --bind {tree} {tree} && mount -o remount,bind,ro {tree} && ! touch {tree}/x 2>/dev/null"
    return (*IN_NAMESPACE, "sh", "-c", f'{mount} && exec "$@"', "sh")


@pytest.fixture
def without_write_permission(checkout):
    """What a command is begun with to find the tree's directories without write permission."""
    begin = ()
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("permission bits do not bind root, and there is no setpriv")
        begin = WITHOUT_OVERRIDE
    directories = [checkout, *(path for path in checkout.rglob("*") if path.is_dir())]
    for directory in directories:
        directory.chmod(0o555)
    if subprocess.run([*begin, "touch", checkout / "vllm" / "x"], stderr=subprocess.DEVNULL).returncode == 0:
        pytest.skip("permission bits do not bind this user")
    yield begin
    for directory in directories:
        directory.chmod(0o755)


KINDS = pytest.mark.parametrize("kind", ["on_read_only_mount", "without_write_permission"])


@KINDS
def test_check_and_status_work_and_check_says_that_apply_could_not_write(kind, checkout, request):
    begin = request.getfixturevalue(kind)
    before = contents(checkout)
    checked = run(begin, checkout, "--check")
    assert (checked.returncode, checked.stderr) == (0, ""), checked
    assert "The series fits, but this user cannot write " in checked.stdout
    status = run(begin, checkout, "--status")
    assert (status.returncode, status.stderr) == (1, ""), status
    assert status.stdout.count("  vLLM's own\n") == len(load().files)
    assert contents(checkout) == before


@KINDS
def test_apply_is_refused_and_says_what_hinders_it(kind, checkout, request):
    begin = request.getfixturevalue(kind)
    before = contents(checkout)
    applied = run(begin, checkout)
    assert applied.returncode == 1 and applied.stderr.startswith("refused: "), applied
    if kind == "on_read_only_mount":
        assert "Read-only file system" in applied.stderr and "owner" not in applied.stderr
    else:
        assert "Permission denied" in applied.stderr and f"run this as the owner of {checkout}" in applied.stderr
    assert contents(checkout) == before


def test_a_file_that_may_not_be_read_is_named_without_a_traceback(without_write_permission, checkout):
    path = next(iter(load().files))
    (checkout / path).chmod(0)
    checked = run(without_write_permission, checkout, "--check")
    assert (checked.returncode, checked.stderr) == (1, ""), checked
    assert f"unreadable  {path}" in checked.stdout and "Permission denied" in checked.stdout
    status = run(without_write_permission, checkout, "--status")
    assert status.returncode == 1 and "unreadable" in status.stdout and not status.stderr
