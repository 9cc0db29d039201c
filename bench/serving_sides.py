# SPDX-License-Identifier: Apache-2.0
"""The servers that ``bench/serving.py`` compares: the tiny hybrid model without a connector, with ours, with others."""

import contextlib
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from tools.process_group import ProcessGroup
from tools.server import Server
from tools.server_process import ServerError, free_port
from vllm_overlay.server.api_client import ApiClient

BLOCK_TOKENS = 640
"""N of the tiny model with bfloat16 states."""
MATCH_UNIT = 64
LMCACHE_BLOCK_TOKENS = 544
"""LMCache 0.5.6 takes a state's page on a CPU only if it is filled to the end: with N = 544 these are, with 640 not."""
TOKEN_BYTES = 2 * 2 * 32 * 2
"""Keys and values of 2 heads of 32 dimensions in bfloat16, in the one layer of attention (``tools/tiny_model.py``)."""
SNAPSHOT_BYTES = 3 * (4 * 128 * 128 * 2 + (2 * 2 * 128 + 4 * 128) * 3 * 2)
"""Three layers: a state of 4 heads of 128 x 128, and the convolution's last three inputs, in bfloat16."""
CONTEXT_TOKENS = 16384
MAX_SEQUENCES = 4
STEP_TOKENS = 2048
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Left alone, vLLM gives a server on two cores one thread, and two with a connector (``ompmultiprocessing.py``)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a side may use. ``device_blocks``: of vLLM's own KV cache, which is its prefix cache too."""

    device_blocks: int
    cpu_bytes: int
    disk_bytes: int


def one_tier(settings: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "HybridOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}


def below_multi_connector(tiers: Sequence[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """``--kv-transfer-config`` of our tiers. ``settings``: the MultiConnector's own."""
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "vllm_overlay.multi_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [one_tier(tier) for tier in tiers], **settings},
    }


@dataclass(frozen=True, slots=True)
class Side:
    """One server. ``cpu``: it has a tier in host memory. ``policy``: ``eviction_policy`` of our tiers, "" for vLLM's.

    ``disk``: it has one on disk, too. ``loads_always``: whatever our tiers have is loaded; else they measure whether
    computing is faster. ``match_unit``: vLLM's ``--prefix-match-unit``, in tokens, and ``block_tokens`` its N.
    ``lmcache``: it is LMCache's, which is unpacked there.
    """

    name: str
    cpu: bool = False
    disk: bool = False
    policy: str = ""
    loads_always: bool = False
    match_unit: int = MATCH_UNIT
    block_tokens: int = BLOCK_TOKENS
    lmcache: str = ""

    @property
    def is_ours(self) -> bool:
        return bool(self.policy)

    def device_blocks(self, sizes: Sizes) -> int:
        """Blocks of its own size in as many bytes as the other sides have."""
        return sizes.device_blocks * BLOCK_TOKENS // self.block_tokens

    def transfer_config(self, sizes: Sizes, root: Path) -> dict[str, Any] | None:
        """``--kv-transfer-config``; None without a connector."""
        if not self.cpu:
            return None
        if self.lmcache:
            return self._lmcache(sizes)
        return self._ours(sizes, root) if self.is_ours else self._offloading(sizes, root)

    def _ours(self, sizes: Sizes, root: Path) -> dict[str, Any]:
        weights = (1.0, 0.9) if self.loads_always else ("auto", "auto")
        tiers: list[dict[str, Any]] = [{"tier": "cpu", "capacity_bytes": sizes.cpu_bytes}]
        if self.disk:
            tiers.append({"tier": "disk", "root": str(root), "capacity_bytes": sizes.disk_bytes})
        for tier in tiers:
            tier["eviction_policy"] = self.policy
        if len(tiers) == 1:
            return one_tier(tiers[0])
        return below_multi_connector([tier | {"load_weight": one} for tier, one in zip(tiers, weights, strict=True)])

    def _offloading(self, sizes: Sizes, root: Path) -> dict[str, Any]:
        """vLLM's OffloadingConnector. Its copies are CUDA's, so the tests' small worker does them on a CPU."""
        settings: dict[str, Any] = {
            "spec_name": "CpuTiering",
            "spec_module_path": "tests.multi_connector.third_party",
            "cpu_bytes_to_use": sizes.cpu_bytes,
        }
        if self.disk:
            settings["secondary_tiers"] = [{"type": "fs", "root_dir": str(root)}]
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}

    def _lmcache(self, sizes: Sizes) -> dict[str, Any]:
        """LMCache's connector, which starts LMCache's server. That moves the data itself, over shared memory."""
        arguments = [
            *("--l1-size-gb", str(sizes.cpu_bytes / 2**30), "--eviction-policy", "LRU"),
            *("--chunk-size", str(self.block_tokens), "--separate-object-groups"),
            *("--supported-transfer-mode", "lmcache_driven"),
            *("--http-port", str(free_port()), "--disable-observability"),
        ]
        return {
            "kv_connector": "RepairedLMCacheConnector",
            "kv_connector_module_path": "bench.lmcache_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
                "lmcache.mp.server_urls": f"tcp://127.0.0.1:{free_port()}",
                "lmcache.mp.autostart": True,
                "lmcache.mp.autostart.server_args": shlex.join(arguments),
            },
        }


@dataclass(frozen=True, slots=True)
class Running:
    """A side whose server is up."""

    side: Side
    api: ApiClient
    group: ProcessGroup

    @property
    def name(self) -> str:
        return self.side.name

    def cpu_seconds(self) -> float:
        """What the thread that runs the model has used so far, which is its process's first.

        Unlike time by the clock, it hardly knows who else is on the machine. Other threads of vLLM's spin.
        """
        for pid in self.group.pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if any("EngineCore" in word for word in (process.name(), *process.cmdline())):
                    return float(sum(one.user_time + one.system_time for one in process.threads() if one.id == pid))
        raise ServerError(f"{self.name}: none of its processes is called EngineCore")

    def settle(self) -> None:
        """Returns when its requests are counted and, if it is ours, stored."""
        if self.side.is_ours:
            self.api.wait_for_stores()
        else:
            self.api.settled_metrics()


NONE = Side("no connector")
OFFLOADING = Side("OffloadingConnector", cpu=True)
OFFLOADING_FS = Side("OffloadingConnector, fs tier", cpu=True, disk=True)


def lmcache(unpacked: Path) -> Side:
    """LMCache 0.5.6 with its memory alone. It restores whole blocks, so vLLM matches whole blocks too."""
    tokens = LMCACHE_BLOCK_TOKENS
    return Side("LMCache, repaired", cpu=True, match_unit=tokens, block_tokens=tokens, lmcache=str(unpacked.resolve()))


def ours(policies: Sequence[str], loading: Sequence[str]) -> list[Side]:
    """A side for each value of ``eviction_policy``, with both tiers, and for each of LOADING."""
    return [
        Side(f"ours, {policy}{LOADING[how]}", cpu=True, disk=True, policy=policy, loads_always=how == "always")
        for policy in policies
        for how in loading
    ]


LOADING = {"measured": "", "always": ", loads always"}
"""When our tiers load: when they expect it to be faster than computing, which is their default, or always."""


def server(side: Side, model: Path, sizes: Sizes, directory: Path) -> Server:
    """Of a side, with its log and the root of its disk tier in ``directory``, which is there."""
    return Server(
        model,
        side.transfer_config(sizes, directory / "root"),
        log_path=directory / "server.log",
        arguments=[
            *("--mamba-ssm-cache-dtype", "bfloat16", "--block-size", str(side.block_tokens)),
            *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(MAX_SEQUENCES)),
            *("--max-num-batched-tokens", str(STEP_TOKENS), "--prefix-match-unit", str(side.match_unit)),
            *("--num-gpu-blocks-override", str(side.device_blocks(sizes))),
        ],
        environment={**ONE_THREAD, "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": _python_path(side.lmcache)},
    )


def _python_path(lmcache: str) -> str:
    """The repository first: a server imports our own adapters of others by their names."""
    repository = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join([repository, *filter(None, [lmcache, os.environ.get("PYTHONPATH")])])
