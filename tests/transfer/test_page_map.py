# SPDX-License-Identifier: Apache-2.0
"""A page map is believed only when vLLM's own cache write agrees with it."""

from collections.abc import Callable

import pytest
import torch

from vllm_overlay.transfer.page_check import CacheWrite, TokenShape, find_page_map
from vllm_overlay.transfer.page_map import KeyValueMap, Packing, PageMap, known_page_maps

BLOCK, HEADS, SIZE = 96, 2, 64

pytestmark = pytest.mark.processor
needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's AMX kernels refuse to run: this processor has no AMX tiles"
)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    platforms = pytest.importorskip("vllm.platforms")
    if not platforms.current_platform.is_cpu():
        pytest.skip("the operators under test are vLLM's for the CPU")
    platforms.current_platform.import_kernels()


def vllm_write(isa: str, **options: str) -> CacheWrite:
    """vLLM's cache write as its CPU backend calls it."""
    from vllm._custom_ops import cpu_attn_reshape_and_cache

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        blocks, heads, tokens, width = cache.shape
        halves = cache.view(blocks, heads, 2 * tokens, width // 2).chunk(2, dim=2)
        cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa, **options)

    return write


def cache(dtype: torch.dtype = torch.bfloat16, block_size: int = BLOCK) -> torch.Tensor:
    return torch.zeros((4, HEADS, block_size, 2 * SIZE), dtype=dtype)


def find(cache: torch.Tensor, write: CacheWrite) -> PageMap | None:
    """What the check says of a cache whose cells are a key and a value."""
    _, heads, _, width = cache.shape
    return find_page_map(cache, write, cache.shape[0], TokenShape(heads, width // 2, width // 2, cache.dtype))


def map_write(page_map: KeyValueMap) -> CacheWrite:
    """A cache write that obeys a map."""

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        blocks, offsets = slots // cache.shape[2], slots % cache.shape[2]
        for view, tokens in zip(page_map.parts(cache), (keys, values), strict=True):
            unit = view.shape[2]
            view[blocks, offsets // unit, offsets % unit] = tokens.view(-1, *view.shape[3:])

    return write


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_the_vector_kernels_keep_keys_column_major(isa: str, dtype: torch.dtype) -> None:
    found = find(cache(dtype), vllm_write(isa))
    assert found is not None
    assert found.name == "column_keys"


@needs_amx
def test_the_amx_kernels_keep_tiles() -> None:
    found = find(cache(), vllm_write("amx"))
    assert found is not None
    assert (found.name, found.token_unit) == ("amx_tiles", 16)


@pytest.mark.parametrize("page_map", known_page_maps(BLOCK, SIZE), ids=lambda page_map: page_map.name)
def test_every_known_map_finds_itself(page_map) -> None:
    assert find(cache(), map_write(page_map)) == page_map


@pytest.mark.parametrize("isa", ["vec", pytest.param("amx", marks=needs_amx)])
def test_the_real_geometry_is_found(isa: str) -> None:
    found = find(torch.zeros((2, 2, 1056, 512), dtype=torch.bfloat16), vllm_write(isa))
    assert found in known_page_maps(1056, 256)


def test_the_cache_itself_is_not_written() -> None:
    real = torch.full((4, HEADS, BLOCK, 2 * SIZE), 3.0, dtype=torch.bfloat16)
    find(real, vllm_write("vec"))
    assert (real == 3.0).all()


@pytest.mark.parametrize("isa", ["vec", pytest.param("amx", marks=needs_amx)])
def test_the_map_is_that_of_the_real_strides(isa: str) -> None:
    """Pages with padding after them, and heads that are not next to each other."""
    shape = (4, HEADS, BLOCK, 2 * SIZE)
    head = BLOCK * 2 * SIZE
    for strides in ((HEADS * head + 64, head), (3 * HEADS * head, 3 * head), (head, 4 * head)):
        real = torch.zeros(shape[0] * shape[1] * 3 * head, dtype=torch.bfloat16).as_strided(
            shape, (*strides, 2 * SIZE, 1)
        )
        assert find(real, vllm_write(isa)) in known_page_maps(BLOCK, SIZE)


def also_elsewhere(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    vllm_write("vec")(keys, values, cache, slots)
    cache[0, 0, 0, 0] = 1


def swapped(offsets: torch.Tensor) -> torch.Tensor:
    return torch.where(offsets == 7, 41, torch.where(offsets == 41, 7, offsets))


UNEXPLAINED: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "one place on": lambda keys, values, slots: (keys, values, slots // BLOCK * BLOCK + (slots + 1) % BLOCK),
    "two tokens": lambda keys, values, slots: (keys, values, slots // BLOCK * BLOCK + swapped(slots % BLOCK)),
    "two heads": lambda keys, values, slots: (keys.flip(1), values.flip(1), slots),
    "a neighbour's value": lambda keys, values, slots: (keys, values.roll(1, dims=0), slots),
    "keys only": lambda keys, values, slots: (keys, torch.zeros_like(values), slots),
    "values only": lambda keys, values, slots: (torch.zeros_like(keys), values, slots),
    "another block": lambda keys, values, slots: (keys, values, slots - BLOCK),
}
"""What is written instead of these tokens, or where."""


@pytest.mark.parametrize("change", UNEXPLAINED.values(), ids=UNEXPLAINED)
def test_what_no_map_explains_has_none(change: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        keys, values, slots = change(keys, values, slots)
        vllm_write("vec")(keys, values, cache, slots)

    assert find(cache(), write) is None


def test_a_write_that_also_writes_elsewhere_has_no_map() -> None:
    assert find(cache(), also_elsewhere) is None


@pytest.mark.parametrize("stored", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_keys_in_columns_are_not_cells(stored: str) -> None:
    """The CPU kernels keep fp8 keys column-major too, and no map is known for them: such pages move whole."""

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        vllm_write("vec", kv_cache_dtype=stored)(keys, values, cache, slots)
        assert cache.any()

    fp8 = torch.zeros((4, HEADS, BLOCK, 2 * SIZE), dtype=torch.uint8)
    try:
        token = torch.ones((1, HEADS, SIZE), dtype=torch.bfloat16)
        write(token, token, fp8.clone(), torch.tensor([0]))
    except RuntimeError as error:
        if "Unsupported CPU attention configuration" not in str(error):
            raise
        pytest.skip("vLLM's kernels for this processor take no fp8 cache")
    assert find_page_map(fp8, write, 4, TokenShape(HEADS, SIZE, SIZE, torch.bfloat16)) is None


@pytest.mark.parametrize(
    "strange",
    [
        torch.zeros((4, 100)),
        torch.zeros((4, 2 * HEADS, 96, 64), dtype=torch.uint8),
        torch.zeros((4, HEADS, 96, 128, 2))[..., 0],
        torch.zeros((5, HEADS, 96, 128)),
    ],
    ids=["two dimensions", "more heads than a token has", "elements apart", "no multiple of the blocks"],
)
def test_caches_of_another_kind_are_not_even_tried(strange: torch.Tensor) -> None:
    def never(*_: torch.Tensor) -> None:
        raise AssertionError("the write must not be called")

    assert find_page_map(strange, never, 4, TokenShape(HEADS, SIZE, SIZE, strange.dtype)) is None


def test_amx_maps_need_whole_tiles() -> None:
    assert "amx_tiles" not in [page_map.name for page_map in known_page_maps(48, 64)]


def test_a_packing_names_elements_by_its_formula() -> None:
    packing = Packing(3, 40, 10, token_inner=2, inner_token_stride=1, dim_inner=2, inner_dim_stride=4)
    page = torch.arange(200, dtype=torch.float32).view(1, 1, 4, 50)
    view = packing.view(page, 6).reshape(4, 6)
    for token in range(4):
        for dim in range(6):
            assert view[token, dim] == 3 + token // 2 * 40 + token % 2 + dim // 2 * 10 + dim % 2 * 4
