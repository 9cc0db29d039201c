# SPDX-License-Identifier: Apache-2.0
"""Build hook: a wheel carries patches/ inside the package; an editable install reads the clone's own."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PatchesHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["force_include"]["patches"] = "vllm_overlay/_patches"
