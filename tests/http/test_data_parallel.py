# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: engines of one server share the disk tier's root, and keep their CPU tiers to themselves."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.engine.client import cpu_child, disk_child, multi, prompt
from tests.engine.restore import restorable, restored_bytes
from tests.engine.states import FLOAT32
from tests.http.warm_server import WarmServer
from tests.waiting import until
from vllm_overlay.server.api_client import ApiClient, Completion, Metrics
from vllm_overlay.tiers.disk.catalogue import Catalogue

pytestmark = pytest.mark.engine

LENGTH = FLOAT32.block_size + 150
LOADED = "vllm:hybrid_offload_loaded_bytes_total"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "root"


@pytest.fixture(scope="module")
def api(tiny_model: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiClient]:
    """One server with two engines."""
    server = WarmServer(
        tiny_model,
        multi(cpu_child(), disk_child(root)),
        log_path=tmp_path_factory.mktemp("log") / "server.log",
        arguments=[*FLOAT32.flags, "--data-parallel-size", "2"],
        environment={"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    with server as client:
        yield client


@pytest.mark.parametrize(("stores", "restores"), [(0, 1), pytest.param(1, 0, marks=pytest.mark.engines)])
def test_what_one_engine_stores_the_other_restores_while_both_run(
    api: ApiClient, root: Path, stores: int, restores: int
) -> None:
    """Engines hear of each other's objects now and then. Until one does, it computes, and another prompt is stored."""
    attempts = itertools.count()

    def before_the_first_restore() -> Metrics | None:
        attempt = next(attempts)
        tokens = prompt(LENGTH, seed=1000 * stores + attempt)
        before = api.metrics()
        cold = api.complete(tokens, engine=stores)
        api.wait_for_stores()
        for number in range(attempt):  # each time it has longer to hear of it
            api.complete(prompt(20, seed=3000 + number), engine=restores)
        answer = api.complete(tokens, engine=restores)
        assert cold.num_cached_tokens == 0
        assert answer.same_as(cold)
        return before if answer.num_cached_tokens == restorable(LENGTH) else None

    before = until(before_the_first_restore, "the restore of what the other engine has stored")
    assert before is not None
    after = api.wait_for_stores()
    loaded = {
        (tier, engine): after.value(LOADED, connector=tier, engine=str(engine))
        - before.value(LOADED, connector=tier, engine=str(engine))
        for tier in ("cpu", "disk")
        for engine in (stores, restores)
    }
    expected = restored_bytes(FLOAT32, LENGTH)
    assert loaded == {("cpu", stores): 0, ("cpu", restores): 0, ("disk", stores): 0, ("disk", restores): expected}
    with closing(Catalogue(str(root))) as catalogue:
        assert len(catalogue.usage()) == 1  # that of both engines is one


def test_both_engines_are_right_when_both_store_and_load_at_once(api: ApiClient) -> None:
    prompts = [prompt(LENGTH, seed=5000 + number) for number in range(6)]
    cold = [api.complete(tokens, engine=number % 2) for number, tokens in enumerate(prompts)]
    api.wait_for_stores()
    api.reset_prefix_cache()

    def all_from(engine: int) -> list[Completion]:
        """One at a time: alone in its batch, each is computed as the cold one was."""
        return [api.complete(tokens, engine=engine) for tokens in prompts]

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(all_from, (0, 1)))
    for of_engine in answers:
        assert all(map(Completion.same_as, of_engine, cold))
    assert sum(answer.num_cached_tokens > 0 for of_engine in answers for answer in of_engine) >= len(prompts)
    assert api.settled_metrics().value("vllm:hybrid_offload_hook_errors_total") == 0
