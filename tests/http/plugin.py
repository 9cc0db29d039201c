# SPDX-License-Identifier: Apache-2.0
"""Faults in a server under test: vLLM plugins that an environment variable installs."""

from pathlib import Path

from tests.python_path import python_path


def plugin(directory: Path, name: str, source: str) -> dict[str, str]:
    """Writes a plugin to ``directory``; returns the environment in which vLLM finds it.

    ``source`` has a function ``register``, which every process of vLLM calls.
    """
    package = directory / f"{name}-1.dist-info"
    package.mkdir(parents=True)
    (directory / f"{name}.py").write_text(source)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    return {"PYTHONPATH": python_path(directory)}
