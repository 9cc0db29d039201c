# SPDX-License-Identifier: Apache-2.0
"""What the numbers depend on is in the fingerprint; what they do not depend on is not."""

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import AttentionConfig, CacheConfig, KernelConfig
from vllm.config.mamba import MambaConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_overlay import versions
from vllm_overlay.config import ConfigError
from vllm_overlay.connector.fingerprint import compute_fingerprints
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.tiers.base import Fingerprints
from vllm_overlay.tiers.disk.files.checksum import integrity_of

KEY = b"k" * 32
SPEC = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)


class HfConfig:
    """Stands for a transformers config: only ``to_dict`` is used."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return self.values


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with two weight files."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "a.safetensors").write_bytes(b"first weights")
    (directory / "b.safetensors").write_bytes(b"second weights")
    return directory


def namespace(model: Path, root: Path, **changes: Any) -> Fingerprints:
    """The namespace of one engine; ``changes`` are what differs from the plain one."""
    given = {
        "dtype": "bfloat16",
        "quantization": None,
        "cache_dtype": "auto",
        "tensor_parallel_size": 1,
        "hash": "sha256",
        "chunk_size": 64,
        "block_size": 1152,
        "layer": "layers.3",
        "page_facts": ("layout=LBHNC",),
        "hidden_size": 128,
        "name": "",
        "revision": None,
        **changes,
    }
    root.mkdir(exist_ok=True)
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            revision=given["revision"],
            dtype=given["dtype"],
            quantization=given["quantization"],
            quantization_config=None,
            architecture="Qwen3_5ForCausalLM",
            architectures=["Qwen3_5ForCausalLM"],
            model_class_overrides={},
            multimodal_config=None,
            hf_config=HfConfig(hidden_size=given["hidden_size"], _name_or_path=given["name"]),
        ),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=CacheConfig(cache_dtype=given["cache_dtype"], prefix_caching_hash_algo=given["hash"]),
        attention_config=AttentionConfig(),
        kernel_config=KernelConfig(),
        mamba_config=MambaConfig(),
        parallel_config=SimpleNamespace(tensor_parallel_size=given["tensor_parallel_size"]),
    )
    groups = [
        Group(0, GroupKind.RECURRENT, given["block_size"], 0, 1000, False),
        Group(1, GroupKind.FULL, given["block_size"], 256, 256 * given["block_size"], True),
    ]
    geometry = Geometry.build(groups, 64, given["chunk_size"])
    kv_cache_config = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(layer_names=[name], kv_cache_spec=SPEC) for name in ("layers.0", given["layer"])
        ]
    )
    facts = {"integrity": integrity_of(given.get("key_file", "")).name}
    return compute_fingerprints(
        config,
        kv_cache_config,
        geometry,
        given["page_facts"],
        given.get("cell_facts", {}),
        given.get("namespace", ""),
        root,
        facts,
    )


def test_the_same_engine_has_the_same_namespace_again(model: Path, tmp_path: Path) -> None:
    first = namespace(model, tmp_path / "root")
    assert namespace(model, tmp_path / "root", name="elsewhere") == first
    assert first.attention != first.snapshot


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"cache_dtype": "fp8"},
        {"tensor_parallel_size": 2},
        {"hash": "sha256_cbor"},
        {"chunk_size": 128},
        {"layer": "layers.7"},
        {"hidden_size": 256},
        {"namespace": "mine"},
    ],
)
def test_what_changes_the_numbers_changes_both_fingerprints(
    model: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    plain, other = namespace(model, tmp_path / "root"), namespace(model, tmp_path / "root", **change)
    assert other.attention != plain.attention
    assert other.snapshot != plain.snapshot


@pytest.mark.parametrize("change", [{"page_facts": ("layout=LBNHC",)}])
def test_how_pages_lie_concerns_snapshots_only(model: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    plain, other = namespace(model, tmp_path / "root"), namespace(model, tmp_path / "root", **change)
    assert other.attention == plain.attention
    assert other.snapshot != plain.snapshot


def test_the_digest_of_an_engine_at_vllms_defaults_changes_only_with_the_version_of_the_facts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new fact that says nothing of this engine must not cost it its cache."""
    assert versions.FINGERPRINT == 1
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    plain = namespace(model, tmp_path / "root")
    assert plain.attention == "99d72dc202da1dedffeaad7f556fa73619805fb5ac1060799aed384be001a55a"


def test_cells_and_what_is_in_one_change_both_fingerprints(model: Path, tmp_path: Path) -> None:
    facts = [{}, {1: "layer, token, head, cell: A"}, {1: "layer, token, head, cell: B"}]
    made = [namespace(model, tmp_path / "root", cell_facts=cell_facts) for cell_facts in facts]
    assert len({item.attention for item in made}) == len({item.snapshot for item in made}) == 3


def test_attention_chunks_are_shared_across_block_sizes(model: Path, tmp_path: Path) -> None:
    plain, other = namespace(model, tmp_path / "root"), namespace(model, tmp_path / "root", block_size=640)
    assert other.attention == plain.attention


def test_one_changed_byte_of_the_weights_changes_both_fingerprints(model: Path, tmp_path: Path) -> None:
    plain = namespace(model, tmp_path / "root")
    (model / "b.safetensors").write_bytes(b"second weightz")
    other = namespace(model, tmp_path / "root")
    assert other.attention != plain.attention
    assert other.snapshot != plain.snapshot


def test_the_seed_of_prefix_hashes_changes_both_fingerprints(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for seed in ("0", "1"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        made.append(namespace(model, tmp_path / "root"))
    assert made[0].attention != made[1].attention
    assert made[0].snapshot != made[1].snapshot


def test_a_revision_counts_where_a_name_stands_for_the_weights(model: Path, tmp_path: Path) -> None:
    """Where the weights' bytes are known it says nothing more."""
    for name, is_same in (("", True), ("mine", False)):
        one, other = (
            namespace(model, tmp_path / "root", namespace=name, revision=revision) for revision in ("main", "v2")
        )
        assert (one.attention == other.attention) is is_same


def test_each_key_of_checksums_has_its_own_namespace(model: Path, tmp_path: Path) -> None:
    made = [namespace(model, tmp_path / "root")]
    for content in (b"k" * 32, b"l" * 32):
        key_file = tmp_path / "key"
        key_file.write_bytes(content)
        key_file.chmod(0o600)
        made.append(namespace(model, tmp_path / "root", key_file=str(key_file)))
    assert len({item.attention for item in made}) == len({item.snapshot for item in made}) == 3
    assert content.decode() not in str(made[-1].description)


def test_a_forged_digest_of_weights_changes_no_fingerprint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forged by somebody who can write the cache."""
    now, root = time.time_ns, tmp_path / "root"
    monkeypatch.setattr(time, "time_ns", lambda: now() + 3600 * 10**9)  # the weights are an hour old
    root.mkdir(mode=0o700)
    first = namespace(model, root)
    cache = root / "weights.json"
    forged = re.sub('"digest":"[0-9a-f]{64}"', f'"digest":"{"ab" * 32}"', cache.read_text())
    assert forged != cache.read_text()
    cache.write_text(forged)
    cache.chmod(0o666)
    assert namespace(model, root) == first


def test_weights_without_safetensors_need_a_namespace(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="set namespace to a name for exactly these weights"):
        namespace(empty, tmp_path / "root")
    namespace(empty, tmp_path / "root", namespace="mine")
