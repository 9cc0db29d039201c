# SPDX-License-Identifier: Apache-2.0
"""The table of settings in docs/disk-format.md is what the code does, row by row."""

import dataclasses
import inspect
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import envs
from vllm.config import CacheConfig, MultiModalConfig
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from tests.connector.engine_facts import Settings, fingerprints, vllm_config
from tests.connector.fingerprint_cases import BOTH, HELD, NONE, RAW, SET_VARIABLES, SHARED, SNAPSHOT, Change
from vllm_overlay.connector.compatibility import unsupported
from vllm_overlay.connector.lora.digests import LoadedAdapters
from vllm_overlay.connector.numerics import MEDIA_VARIABLES, NO_FACTS_OF_MEDIA, PRECISION_VARIABLES

DOCUMENT = Path(__file__).parents[2] / "docs" / "disk-format.md"
BLOCK_HASH, KEY, REFUSED = "block hash", "key", "refused"
LORA = "LoRA adapters, `--lora-dtype`, other settings of LoRA"

REQUESTS: dict[str, list[dict[str, Any]]] = {
    "tokens, images and other media with their `mm_processor_kwargs`, prompt embeddings, `cache_salt`": [
        {"cache_salt": "mine"},
        {"mm_features": [SimpleNamespace(identifier="hash", mm_position=SimpleNamespace(offset=0, length=4))]},
    ]
}
"""What vLLM's hash of a block holds."""

REFUSALS: dict[str, list[tuple[str, Any]]] = {
    "other ways to speculate, pipeline and context parallelism": [
        ("speculative_config", SimpleNamespace(method="draft_model")),
        ("parallel_config.pipeline_parallel_size", 2),
        ("parallel_config.decode_context_parallel_size", 2),
        ("parallel_config.prefill_context_parallel_size", 2),
    ]
}
CASES = [
    *(
        (held_by, name, change)
        for held_by, rows in ((BOTH, HELD), (SNAPSHOT, RAW), (NONE, SHARED))
        for name, change in rows.items()
    )
]


def table() -> dict[str, str]:
    """The rows of the document's table: what holds each setting."""
    text = DOCUMENT.read_text()
    part = text[text.index("<!-- settings:begin -->") : text.index("<!-- settings:end -->")]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines() if line.startswith("| ")
    ]
    return {name.strip(): held_by for name, held_by, why in rows[1:] if why and not name.startswith("---")}


def test_every_row_of_the_table_has_a_case_and_every_case_a_row() -> None:
    cases = {name: held_by for held_by, name, _ in CASES}
    cases |= dict.fromkeys(REQUESTS, BLOCK_HASH) | dict.fromkeys(REFUSALS, REFUSED) | {LORA: KEY}
    assert cases == table()
    assert all(changes for _, _, changes in CASES)


@pytest.fixture(autouse=True)
def no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.mark.parametrize(("held_by", "name", "changes"), CASES, ids=[name for _, name, _ in CASES])
def test_a_setting_changes_the_fingerprints_that_the_table_says(
    tiny_model: Path, held_by: str, name: str, changes: list[Change]
) -> None:
    del name
    for change in changes:
        first, other = fingerprints(tiny_model, change.first), fingerprints(tiny_model, change.other)
        found = (first.attention != other.attention, first.snapshot != other.snapshot)
        assert found == {BOTH: (True, True), SNAPSHOT: (False, True), NONE: (False, False)}[held_by], change


def test_the_digest_of_a_processors_file_is_a_fact_of_multimodal_models_alone(tiny_model: Path) -> None:
    texts, images = Settings(), Settings(media={})
    before = [fingerprints(tiny_model, settings).attention for settings in (texts, images)]
    path = tiny_model / "preprocessor_config.json"
    path.write_text('{"max_pixels": 1000}')
    try:
        after = [fingerprints(tiny_model, settings).attention for settings in (texts, images)]
    finally:
        path.unlink()
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_scales_of_an_image_encoder_count_by_their_values(tiny_model: Path, tmp_path: Path) -> None:
    made = set()
    for directory, content in (("a", "{}"), ("b", "{}"), ("c", '{"scale": 2}')):
        path = tmp_path / directory
        path.mkdir()
        (path / "scales.json").write_text(content)
        media = {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(path / "scales.json")}
        made.add(fingerprints(tiny_model, Settings(media=media)).attention)
    assert len(made) == 2


@pytest.mark.parametrize("changed", [changed for rows in REQUESTS.values() for changed in rows], ids=list)
def test_what_a_request_holds_is_in_its_block_hashes(changed: dict[str, Any]) -> None:
    plain = {"mm_features": [], "cache_salt": None, "lora_request": None, "prompt_embeds": None}
    first, other = (
        generate_block_hash_extra_keys(SimpleNamespace(**{**plain, **own}), 0, 4, 0)[0]  # type: ignore[arg-type]
        for own in ({}, changed)
    )
    assert first is None
    assert other is not None


@pytest.mark.parametrize(("path", "value"), [item for rows in REFUSALS.values() for item in rows], ids=str)
def test_what_is_refused_needs_no_fact(tiny_model: Path, path: str, value: Any) -> None:
    config = vllm_config(tiny_model, Settings())
    *parents, name = path.split(".")
    setattr(getattr(config, parents[0]) if parents else config, name, value)
    assert next(unsupported(config), "")


def test_settings_of_lora_are_in_the_digests_of_adapters_and_in_no_fingerprint(tiny_model: Path) -> None:
    model = SimpleNamespace(loras={}, modules_to_save={}, is_3d_lora_weight=False)
    digests, made = set(), set()
    for changed in ({}, {"lora_dtype": "float16"}, {"enable_tower_connector_lora": True}):
        settings = Settings({"enable_lora": True, **changed})
        lora_config = vllm_config(tiny_model, settings).lora_config
        assert lora_config is not None
        adapters = LoadedAdapters(lora_config.compute_hash())
        adapters.heard(SimpleNamespace(lora_int_id=1, lora_name="a", lora_path="a"), model)  # type: ignore[arg-type]
        digests |= {weights.digest for weights in adapters.weights()}
        made.add(fingerprints(tiny_model, settings).attention)
    assert len(digests) == 3
    assert made == {fingerprints(tiny_model, Settings()).attention}


def test_the_defaults_of_variables_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one that is at its default would be a fact."""
    for name in [name for name in os.environ if name in PRECISION_VARIABLES | MEDIA_VARIABLES]:
        monkeypatch.delenv(name)
    for name, default in (PRECISION_VARIABLES | MEDIA_VARIABLES).items():
        assert getattr(envs, name) == default, name
    assert SET_VARIABLES.keys() == PRECISION_VARIABLES.keys()


def test_the_document_names_every_variable() -> None:
    named = set(re.findall(r"`(VLLM_[A-Z0-9_]+)`", DOCUMENT.read_text()))
    assert named >= PRECISION_VARIABLES.keys() | MEDIA_VARIABLES.keys()


def test_fields_of_media_that_are_left_out_exist() -> None:
    assert vars(MultiModalConfig()).keys() >= NO_FACTS_OF_MEDIA


@pytest.mark.parametrize(("flag", "resolved"), [(None, "flashinfer"), ("triton", "triton")])
def test_on_a_hopper_the_default_gdn_prefill_is_flashinfers(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, flag: str | None, resolved: str
) -> None:
    """So its layers, which keep what vLLM resolves here, name other snapshots than with the flag."""
    for name, answer in {"is_rocm": False, "is_cuda": True, "is_device_capability": True}.items():
        monkeypatch.setattr(qwen_gdn_linear_attn.current_platform, name, lambda *_, answer=answer: answer)
    config = vllm_config(tiny_model, Settings({"gdn_prefill_backend": flag}))
    assert qwen_gdn_linear_attn._resolve_gdn_prefill_backend(config)[1] == resolved
    source = inspect.getsource(qwen_gdn_linear_attn.QwenGatedDeltaNetAttention)
    assert "self.gdn_prefill_backend = self.chunk_gated_delta_rule.gdn_prefill_backend" in source


def test_vllm_computes_no_scales_of_the_kv_cache() -> None:
    """As earlier versions could, from an engine's first tokens: two engines would have two scales."""
    assert "calculate_kv_scales" not in {field.name for field in dataclasses.fields(CacheConfig)}
