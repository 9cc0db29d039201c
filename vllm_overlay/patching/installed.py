# SPDX-License-Identifier: Apache-2.0
"""The vLLM of this process's environment: where it is, and whether it has the series.

Our connectors call ``require`` at start, in every vLLM process.
"""

import importlib.metadata
import importlib.util
from pathlib import Path

from vllm_overlay.patching.advice import command
from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.series import load
from vllm_overlay.patching.tree import DISTRIBUTIONS, Status, is_other_version, status
from vllm_overlay.versions import VLLM as VLLM_VERSION

_APPLY = f"`{command('--installed')}`"


class UnpatchedError(RuntimeError):
    """The installed vLLM is not what this overlay needs. One sentence, which names the command that mends it."""


def installed_root() -> Path | None:
    """Where this environment's vLLM lies, without importing it; None when there is none.

    Of its files no link is followed: what they lead to belongs to other environments too (``uv --link-mode=symlink``).
    """
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # vllm is imported, but was put together by hand
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent.resolve().parent


def require() -> str:
    """The check at start of every process: versions and patches in words, for the log.

    Raises UnpatchedError, whose sentence names the command to run. Hashes the touched files, imports nothing.
    """
    root = installed_root()
    if root is None:
        raise UnpatchedError(f"vLLM is not installed here: install vLLM {VLLM_VERSION}, then run {_APPLY}")
    try:
        found = status(root, load())
    except PatchError as error:
        raise UnpatchedError(str(error)) from error
    version = found.vllm_version or _distribution_version()
    if problem := _problem(found, version):
        raise UnpatchedError(problem)
    return f"vLLM {version or VLLM_VERSION}, {found.description}"


def _problem(found: Status, version: str | None) -> str:
    """Why this tree cannot be used, in one sentence. Empty if it can."""
    where = found.root / "vllm"
    if is_other_version(version):
        return (
            f"vLLM {version} is installed and this overlay is made for {VLLM_VERSION}: install vLLM {VLLM_VERSION}, "
            f"then run {_APPLY}"
        )
    if found.foreign:
        files = ", ".join(f"{path} ({file.state})" for path, file in found.foreign.items())
        return (
            f"vLLM in {where} has files that are not those of vLLM {VLLM_VERSION}, patched or not: {files}: run "
            f"`{command('--installed --check')}`, which says how to go on, and how to keep or declare what was edited"
        )
    if found.is_partial:
        return f"the patches were applied to {where} only in part: run {_APPLY}, which repairs it"
    if not found.is_applied:
        return f"vLLM in {where} lacks the {len(found.series.patches)} patches of this overlay: run {_APPLY}"
    return ""


def _distribution_version() -> str | None:
    for distribution in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
