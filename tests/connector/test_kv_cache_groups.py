# SPDX-License-Identifier: Apache-2.0
"""What the worker makes of the tensors that vLLM registers: blocks of vLLM's size, cut or whole, or a refusal."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.transfer.layouts import (
    BLOCK,
    HEADS,
    KINDS,
    LAYERS,
    NUM_BLOCKS,
    SIZE,
    Layout,
    kv_cache_config,
    layer,
    registered,
    views,
    vllm_config,
    with_scales,
    write_to_cells,
)
from tests.transfer.naive import memory_of
from vllm_overlay.config import ConfigError
from vllm_overlay.connector.kv_cache_groups import cell_facts, group_tensors, page_facts, planner_groups
from vllm_overlay.planner.geometry import Group, GroupKind
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.page_map import CellMap

BF16 = KINDS[0]
SCALES = KINDS[3]
LBNHC = Layout(KVCacheLayout.LBNHC)


def groups_of(cache: Any, num_blocks: int = NUM_BLOCKS) -> Any:
    """The groups of a model with one layer."""
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([LAYERS[0]], BF16.spec)]
    )
    return group_tensors(vllm_config({LAYERS[0]: layer(BF16)}), config, {LAYERS[0]: cache}, 16)


def test_kernel_blocks_are_regrouped_to_vllms_blocks() -> None:
    """Else block 1 would be the second kernel block of block 0."""
    caches = views(BF16, Layout(KVCacheLayout.LBNHC, 16))
    assert caches[0].shape == (NUM_BLOCKS * 3, HEADS, 16, 2 * SIZE)
    group = registered(BF16, LBNHC, caches)
    assert group.layers[0].shape == (NUM_BLOCKS, 3, HEADS, 16, 2 * SIZE)
    assert group.layers[0][2, 1].data_ptr() == caches[0][7].data_ptr()
    assert group.layers[0].stride()[1:] == caches[0].stride()


def test_the_numbers_for_the_planner_are_those_of_the_cells() -> None:
    for kind in KINDS:
        group = registered(kind, LBNHC)
        (planned,) = planner_groups(kv_cache_config(kind), {0: group})
        assert planned.sliceable
        assert planned.token_bytes == len(LAYERS) * kind.spec.num_kv_heads * kind.cell_bytes
        assert planned.page_bytes == BLOCK * planned.token_bytes


@pytest.mark.parametrize(
    "cache",
    [
        [torch.zeros(NUM_BLOCKS, 4), torch.zeros(NUM_BLOCKS, 4)],
        torch.zeros(NUM_BLOCKS + 1, HEADS, BLOCK, 2 * SIZE),
        torch.zeros(NUM_BLOCKS, HEADS, BLOCK, 2 * SIZE, 2)[..., 0],
        torch.zeros(NUM_BLOCKS),
    ],
    ids=["two tensors", "no multiple of the blocks", "elements apart", "no pages"],
)
def test_what_can_be_neither_cut_nor_copied_is_refused(cache: Any) -> None:
    with pytest.raises(ConfigError, match=r"layers\.0 is not one tensor of 5 blocks with contiguous rows"):
        groups_of(cache)


def test_rows_that_are_not_tokens_are_not_cut() -> None:
    """A sparse cache has fewer states than tokens."""
    group = groups_of(torch.zeros(NUM_BLOCKS, HEADS, BLOCK // 2, 2 * SIZE, dtype=torch.bfloat16))[0]
    assert group.page_map is None


def test_a_backend_that_cannot_be_asked_has_no_map() -> None:
    config = vllm_config(dict.fromkeys(LAYERS, SimpleNamespace(impl=SimpleNamespace())))
    caches = dict(zip(LAYERS, views(BF16, LBNHC), strict=True))
    assert group_tensors(config, kv_cache_config(BF16), caches, 16)[0].page_map is None


def test_states_are_moved_whole() -> None:
    """As vLLM registers them: bytes, with padding up to the attention's pages."""
    spec = MambaSpec(block_size=BLOCK, shapes=((3, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")
    states = torch.zeros(NUM_BLOCKS, 128, dtype=torch.int8)[:, :96].view(NUM_BLOCKS, 1, 1, 96)
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["states"], spec)]
    )
    group = group_tensors(vllm_config({}), config, {"states": states}, 16)[0]
    assert (group.page_map, group.page_bytes) == (None, 96)


SHAPE: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": SIZE, "dtype": torch.bfloat16}
LATENT: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "dtype": torch.bfloat16}


def planned(spec: KVCacheSpec) -> Group:
    """What the planner hears of a group with this spec that is moved whole."""
    config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(list(LAYERS), spec)])
    (group,) = planner_groups(config, {0: GroupTensors((torch.zeros(NUM_BLOCKS, 8),))})
    return group


def test_chunked_local_attention_is_a_window_that_does_not_slide() -> None:
    group = planned(ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=256))
    assert (group.kind, group.window, group.is_chunked) == (GroupKind.WINDOW, 256, True)
    group = planned(SlidingWindowSpec(**SHAPE, sliding_window=256))
    assert (group.kind, group.window, group.is_chunked) == (GroupKind.WINDOW, 256, False)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FullAttentionSpec(**SHAPE), FullAttentionSpec(**{**SHAPE, "head_size": 2 * SIZE})),
        (MLAAttentionSpec(**LATENT, head_size=SIZE), MLAAttentionSpec(**LATENT, head_size=2 * SIZE)),
    ],
    ids=["heads of two sizes", "latent attention and its sparse indexer"],
)
def test_layers_of_one_type_and_unlike_pages_are_moved_whole(one: Any, other: Any) -> None:
    specs = UniformTypeKVCacheSpecs.from_specs({"one": one, "other": other})
    assert specs is not None
    config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["one", "other"], specs)])
    caches = {
        name: torch.zeros(NUM_BLOCKS, spec.num_kv_heads, BLOCK, spec.page_size_bytes // BLOCK // 2 // spec.num_kv_heads)
        for name, spec in specs.kv_cache_specs.items()
    }
    tensors = group_tensors(vllm_config(dict.fromkeys(caches, layer(BF16))), config, caches, 16)
    (group,) = planner_groups(config, tensors)
    assert (group.kind, group.sliceable) == (GroupKind.FULL, False)
    assert group.page_bytes == sum(cache[0].nbytes for cache in caches.values())


@pytest.mark.parametrize(
    "spec",
    [RSWASpec(**SHAPE, rswa_window=64), SinkFullAttentionSpec(**SHAPE, sink_len=BLOCK)],
    ids=lambda spec: type(spec).__name__,
)
def test_attention_that_only_looks_like_full_attention_is_refused_by_layer_and_spec(spec: Any) -> None:
    """R-SWA forgets answers while it decodes, and sinks hold what no prompt has."""
    refusal = rf"layer {LAYERS[1]} has a {type(spec).__name__}"
    with pytest.raises(ConfigError, match=refusal):
        planned(
            UniformTypeKVCacheSpecs(
                block_size=BLOCK, kv_cache_specs={LAYERS[0]: FullAttentionSpec(**SHAPE), LAYERS[1]: spec}
            )
        )


def test_facts_say_what_a_cell_is() -> None:
    for kind, words in ((BF16, "2 x 64 torch.bfloat16"), (SCALES, "2 x 72 torch.uint8")):
        config, group = vllm_config(dict.fromkeys(LAYERS, layer(kind))), registered(kind, LBNHC)
        assert cell_facts(config, kv_cache_config(kind), {0: group}) == {
            0: f"layer, token, head, cell: {words} by STANDS_FOR_A_GPU_BACKEND"
        }
        assert all("map=cells" in fact for fact in page_facts(config, kv_cache_config(kind), {0: group})[1:-1])


def test_a_group_without_cells_has_no_such_fact() -> None:
    group = registered(BF16, LBNHC, write=lambda *_: None)
    assert cell_facts(vllm_config(dict.fromkeys(LAYERS, layer(BF16))), kv_cache_config(BF16), {0: group}) == {}


class KeepsScales:
    """Like Triton's backend: at its first write it clears the scales of all cells, and keeps a view of them."""

    def __init__(self) -> None:
        self.scales: torch.Tensor | None = None

    def do_kv_cache_update(self, layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        if self.scales is None:
            self.scales = cache[..., SIZE : SIZE + 4]
            self.scales.fill_(1)
        content = with_scales(keys, values)
        write_to_cells(lambda *_: content)(keys, values, cache, slots)
        kernel_block = cache.shape[2]
        self.scales.transpose(1, 2)[slots // kernel_block, slots % kernel_block] = content[..., SIZE : SIZE + 4]


@pytest.mark.parametrize("has_run", [False, True])
def test_the_check_leaves_the_backend_and_the_cache_alone(has_run: bool) -> None:
    """What a backend keeps of its cache stays that of the real one, and the real one is not written."""
    caches = views(SCALES, LBNHC)
    layers = {name: layer(SCALES) for name in LAYERS}
    for own, cache in zip(layers.values(), caches, strict=True):
        own.impl = KeepsScales()
        if has_run:
            own.impl.scales = cache[..., SIZE : SIZE + 4]
    kept = [own.impl.scales for own in layers.values()]
    before = memory_of(caches[0]).copy()
    found = group_tensors(vllm_config(layers), kv_cache_config(SCALES), dict(zip(LAYERS, caches, strict=True)), 16)
    assert isinstance(found[0].page_map, CellMap)
    assert (memory_of(caches[0]) == before).all()
    assert all(own.impl.scales is one for own, one in zip(layers.values(), kept, strict=True))
