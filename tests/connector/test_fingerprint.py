# SPDX-License-Identifier: Apache-2.0
"""What the numbers depend on is in the fingerprint; what they do not depend on is not."""

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

SPEC = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with two weight files."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "a.safetensors").write_bytes(b"first weights")
    (directory / "b.safetensors").write_bytes(b"second weights")
    return directory


def namespace(
    model: Path,
    root: Path,
    *,
    layer: str = "layers.3",
    cell_facts: dict[int, str] | None = None,
    name: str = "",
    revision: str | None = None,
    namespace: str = "",
    key_file: str = "",
    head: Path | None = None,
) -> Fingerprints:
    """The namespace of one engine, whose other settings are the same on every machine."""
    root.mkdir(exist_ok=True)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            revision=revision,
            dtype="bfloat16",
            quantization=None,
            quantization_config=None,
            architecture="Qwen3_5ForCausalLM",
            architectures=["Qwen3_5ForCausalLM"],
            model_class_overrides={},
            multimodal_config=None,
            hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 128, "_name_or_path": name}),
        ),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=CacheConfig(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        attention_config=AttentionConfig(),
        kernel_config=KernelConfig(),
        mamba_config=MambaConfig(),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        speculative_config=speculation(head) if head is not None else None,
        num_prefill_lookahead_tokens=1,
    )
    groups = [Group(0, GroupKind.RECURRENT, 1152, 0, 1000, False), Group(1, GroupKind.FULL, 1152, 256, 294_912, True)]
    specs = [SimpleNamespace(layer_names=[one], kv_cache_spec=SPEC) for one in ("layers.0", layer)]
    return compute_fingerprints(
        config,
        SimpleNamespace(kv_cache_groups=specs),
        Geometry.build(groups, 64, 64),
        ("layout=LBNHC",),
        cell_facts or {},
        namespace,
        root,
        {"integrity": integrity_of(key_file).name},
    )


def speculation(head: Path) -> Any:
    """An EAGLE head in that directory."""
    config = SimpleNamespace(to_dict=lambda: {"layers": 1, "_name_or_path": str(head), "model": {"_name": str(head)}})
    return SimpleNamespace(
        use_eagle=lambda: True,
        use_eagle_block_drop=lambda: True,
        draft_model_config=SimpleNamespace(
            model=str(head), revision=None, dtype="bfloat16", quantization=None, hf_config=config
        ),
        draft_load_config=None,
        kv_cache_dtype=None,
        moe_backend=None,
        index_share_for_mtp_iteration=None,
    )


def test_the_same_engine_has_the_same_namespace_again(model: Path, tmp_path: Path) -> None:
    first = namespace(model, tmp_path / "root")
    assert namespace(model, tmp_path / "root", name="elsewhere") == first
    assert first.attention != first.snapshot


def test_layers_cells_and_what_is_in_one_change_both_fingerprints(model: Path, tmp_path: Path) -> None:
    """Other settings: test_fingerprint_table.py."""
    made = [namespace(model, tmp_path / "root"), namespace(model, tmp_path / "root", layer="layers.7")]
    for words in ("layer, token, head, cell: A", "layer, token, head, cell: B"):
        made.append(namespace(model, tmp_path / "root", cell_facts={1: words}))
    assert len({item.attention for item in made}) == len({item.snapshot for item in made}) == 4


def test_the_digest_of_an_engine_at_vllms_defaults_changes_only_with_the_version_of_the_facts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new fact that says nothing of this engine must not cost it its cache."""
    assert versions.FINGERPRINT == 1
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    plain = namespace(model, tmp_path / "root")
    assert plain.attention == "99d72dc202da1dedffeaad7f556fa73619805fb5ac1060799aed384be001a55a"


def test_one_changed_byte_of_the_weights_changes_both_fingerprints(model: Path, tmp_path: Path) -> None:
    plain = namespace(model, tmp_path / "root")
    (model / "b.safetensors").write_bytes(b"second weightz")
    other = namespace(model, tmp_path / "root")
    assert other.attention != plain.attention
    assert other.snapshot != plain.snapshot


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


def test_weights_without_safetensors_need_a_namespace(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="set namespace to a name for exactly these weights"):
        namespace(empty, tmp_path / "root")
    namespace(empty, tmp_path / "root", namespace="mine")


def test_a_drafters_weights_count_by_their_bytes(model: Path, tmp_path: Path) -> None:
    heads = {"one": b"head", "moved": b"head", "other": b"heap"}
    for name, content in heads.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    one, moved, other = (namespace(model, tmp_path / "root", head=tmp_path / name) for name in heads)
    assert one == moved
    assert len({item.attention for item in (one, other, namespace(model, tmp_path / "root"))}) == 3


def test_a_drafter_without_readable_weights_is_refused_unless_a_name_stands_for_them(
    model: Path, tmp_path: Path
) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "pytorch_model.bin").write_bytes(b"head")
    with pytest.raises(ConfigError, match=rf"the weights of {head} .* are not safetensors .* set namespace to a name"):
        namespace(model, tmp_path / "root", head=head)
    named = namespace(model, tmp_path / "root", head=head, namespace="mine")
    assert named.attention != namespace(model, tmp_path / "root", namespace="mine").attention
