# SPDX-License-Identifier: Apache-2.0
"""What each rung of tools/gpu_smoke.py does, in a process of its own: raises, or returns what it found."""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.gpu_engine import CAREFUL, FLASH, Answer, Engine, difference, environment, on, prompt
from tools.server_process import ServerProcess

NUM_REQUESTS = 50
NUM_OTHERS = 4
"""So many other prompts of the same length push one out of vLLM's own CPU tier, which has room for less."""
CPU_TIER_BYTES = 6 << 20
SMALL_BYTES = 16 << 20
"""A KV cache, and a CPU tier, in which prompts push each other out."""
MAX_REGRET = 0.5
"""Of logprobs. A wrong state or block gives several."""
CPU_TIER = {
    "kv_connector": "HybridOffloadConnector",
    "kv_role": "kv_both",
    # A number, because "auto" loads nothing that is faster to compute, as a tiny model's prompts may be.
    "kv_connector_extra_config": {"tier": "cpu", "capacity_bytes": "1 GiB", "load_weight": 1.0},
}
CONNECTOR = {
    "kv_connector": "MultiConnector",
    "kv_connector_module_path": "vllm_overlay.multi_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [CPU_TIER]},
}
ON_CPU = {"spec_name": "CpuTiering", "spec_module_path": "tests.multi_connector.third_party"}
"""vLLM's OffloadingConnector has no copies for its CPU build. These are the tests' own."""


@dataclass(frozen=True, slots=True)
class Rung:
    """``run`` takes the directory of the model and the device. ``why_not_cpu`` is empty if it means something there."""

    title: str
    run: Callable[[Path, str], str]
    why_not_cpu: str = ""


@dataclass(frozen=True, slots=True)
class Hit:
    """Two restores of one prompt, which are equal. ``far``: how far they are from what was computed."""

    tokens: list[int]
    cold: Answer
    answer: Answer
    num_cached: int
    far: float

    def __str__(self) -> str:
        return (
            f"{self.num_cached} of {len(self.tokens)} tokens restored twice, equal; {_far(self.far)} from the cold run"
        )


def _far(difference: float) -> str:
    return "0" if not difference else f"{difference:.1e}" if math.isfinite(difference) else "other tokens"


def hit_twice(engine: Engine, tokens: list[int], forget: Callable[[], None]) -> Hit:
    """Cold, from vLLM's device cache, and twice from the tiers. Hits of as many tokens are equal to the last bit."""
    (cold,), _ = engine.answers([tokens])
    hits = [engine.answers([tokens])]
    for _ in range(2):
        forget()
        hits.append(engine.answers([tokens]))
    ((by_device,), (at_device,)), ((first,), (num_cached,)), ((second,), (again,)) = hits
    if not num_cached or again != num_cached:
        raise AssertionError(f"{num_cached} and {again} tokens were restored")
    same = {"a second restore": second} | ({"vLLM's device cache": by_device} if at_device == num_cached else {})
    for what, answer in same.items():
        if (far := difference(first, answer)) != 0:
            raise AssertionError(
                f"{num_cached} tokens were restored, and the answer is {_far(far)} from that of {what}"
            )
    return Hit(tokens, cold, first, num_cached, difference(cold, first))


def expect_other(hit: Hit, answer: Answer, what: str) -> str:
    """Else a comparison would miss a wrong restore."""
    if not (far := difference(hit.answer, answer)):
        raise AssertionError(f"{what} change nothing: this comparison would miss a wrong restore")
    return f"{what}: {_far(far)}"


def restored(model: Path, device: str, *, num_tokens: int = 0, **arguments: Any) -> str:
    """By our CUDA copies: cold, evicted, restored twice, and with zeros for states."""
    engine = Engine(model, device, kv_transfer_config=CONNECTOR, **arguments)
    # Two blocks are a multiple of the 64 tokens of the GDN kernels, also where one block is not.
    num_tokens = num_tokens or max(2 * engine.block_size, 1280) + 20
    hit = hit_twice(engine, prompt(num_tokens, seed=1), engine.evict)
    engine.evict()
    zeroed = engine.zero_states()
    (wrong,), _ = engine.answers([hit.tokens])
    return f"{hit} (N = {engine.block_size}); {expect_other(hit, wrong, zeroed)}"


def of_family(name: str, **arguments: Any) -> Callable[[Path, str], str]:
    """``restored`` with another model of the tests."""

    def run(_: Path, device: str) -> str:
        from tests.models import families

        with tempfile.TemporaryDirectory(prefix="gpu-smoke-") as scratch:
            model = getattr(families, f"make_{name}")(Path(scratch) / name)
            return restored(model, device, attention_backend="TRITON_ATTN", enforce_eager=True, **arguments)

    return run


def speculating(_: Path, device: str) -> str:
    """With a module of multi-token prediction. Of each hit vLLM drops the last block."""
    from tools.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory(prefix="gpu-smoke-") as scratch:
        model = make_tiny_model(Path(scratch) / "mtp", has_draft_head=True)
        drafts = {"method": "mtp", "num_speculative_tokens": 2}
        return restored(model, device, num_tokens=3500, speculative_config=drafts, **CAREFUL)


def told_apart(engine: Engine, hit: Hit, what: str) -> str:
    """Another adapter or image, with the same tokens: nothing of them is restored from before where they differ."""
    engine.evict()
    (other,), (num_cached,) = engine.answers([hit.tokens])
    if num_cached:
        raise AssertionError(f"{what}: {num_cached} tokens were restored")
    return f"{hit}; {expect_other(hit, other, what)}"


def with_adapter(model: Path, device: str) -> str:
    from vllm.lora.request import LoRARequest

    from tests.adapters import RANK, make_adapter

    with tempfile.TemporaryDirectory(prefix="gpu-smoke-") as scratch:
        adapter = LoRARequest("adapter", 1, str(make_adapter(Path(scratch), seed=1)))
        engine = Engine(
            model, device, kv_transfer_config=CONNECTOR, enable_lora=True, max_lora_rank=RANK, max_loras=1, **CAREFUL
        )
        engine.adapter = adapter
        engine.answers([prompt(20, seed=2)])  # only a loaded adapter is known
        hit = hit_twice(engine, prompt(2 * engine.block_size + 20, seed=1), engine.evict)
        engine.adapter = None
        return told_apart(engine, hit, "no adapter")


def with_image(_: Path, device: str) -> str:
    from tests.engine.features import picture
    from tests.models.qwen3_5_vl import IMAGE_TOKEN, VISION_END, VISION_START, make_qwen3_5_vl

    with tempfile.TemporaryDirectory(prefix="gpu-smoke-") as scratch:
        model = make_qwen3_5_vl(Path(scratch) / "vl")
        few = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "skip_mm_profiling": True}
        engine = Engine(model, device, kv_transfer_config=CONNECTOR, **few, **CAREFUL)
        engine.image = picture(1)
        tokens = [VISION_START, IMAGE_TOKEN, VISION_END, *prompt(2 * engine.block_size, seed=1)]
        hit = hit_twice(engine, tokens, engine.evict)
        engine.image = picture(2)
        return told_apart(engine, hit, "another image") + "; one token of them is the image, for 64"


def compiled(model: Path, device: str) -> str:
    """As vLLM starts by default: compiled, with its graphs. For few requests, so that they are captured in time."""
    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    return restored(model, device, max_num_seqs=8, **{**FLASH, "enforce_eager": False})


def by_v1(model: Path, device: str) -> str:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return restored(model, device, **FLASH)


def offloading(root: Path, device: str, cpu_bytes: int = CPU_TIER_BYTES) -> dict[str, Any]:
    """examples/gpu-offloading-and-disk.json, small."""
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": cpu_bytes,
        "secondary_tiers": [{"type": "hybrid_disk", "root": str(root), "capacity_bytes": "1 GiB", "min_free_bytes": 0}],
        **(ON_CPU if device == "cpu" else {}),
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def below_ours(child: Mapping[str, Any]) -> dict[str, Any]:
    """With a number for a weight: "auto" would compute a tiny model's prompts. It is looking while it reads from the
    disk, however long that takes."""
    extra = {**child["kv_connector_extra_config"], "load_weight": 1.0}
    settings = {"connectors": [{**child, "kv_connector_extra_config": extra}], "lookup_timeout_ms": 60_000}
    return {**CONNECTOR, "kv_connector_extra_config": settings}


def from_disk(model: Path, device: str, wrap: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> str:
    """vLLM's copies over our disk tier: restored from the disk twice, with zeroed rows, and with flipped bits."""
    with tempfile.TemporaryDirectory(prefix="gpu-smoke-") as scratch:
        root = Path(scratch) / "root"
        config = wrap(offloading(root, device))
        with closing(Engine(model, device, kv_transfer_config=config, **CAREFUL)) as engine:  # it writes until then
            tokens, seeds = prompt(2 * engine.block_size + 20, seed=1), iter(range(100, 1000))

            def push_out() -> None:
                for _ in range(NUM_OTHERS):
                    engine.answers([prompt(len(tokens), next(seeds))], 1)
                    engine.evict()

            hit = hit_twice(engine, tokens, push_out)
            engine.evict()
            engine.zero_rows()
            (wrong,), _ = engine.answers([tokens])
            told = expect_other(hit, wrong, "zeroed rows")
            push_out()
            files = sorted(root.glob("*/*/*.r0"))
            flip(files)
            (damaged,), (num_cached,) = engine.answers([tokens])
            if num_cached or difference(damaged, hit.cold) != 0:
                far = _far(difference(damaged, hit.cold))
                raise AssertionError(
                    f"after {len(files)} flipped bits {num_cached} tokens hit, {far} from the cold run"
                )
            return (
                f"{hit} (N = {engine.block_size}); {told}; {len(files)} flipped files: computed, equal to the cold run"
            )


def flip(paths: Sequence[Path]) -> None:
    """One bit in the middle of each file."""
    for path in paths:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)


def after_restart(model: Path, device: str, config: Callable[[Path, str], dict[str, Any]]) -> str:
    """Over HTTP: what ``vllm-overlay verify`` says of a server, and of the next one on its disk."""
    with tempfile.TemporaryDirectory(prefix="gpu-smoke-") as scratch:
        answers, said = Path(scratch) / "answers.json", []
        for life in (["--longest", "3000", "--save", str(answers)], ["--against", str(answers)]):
            served = served_by(model, device, config(Path(scratch) / "root", device))
            server = ServerProcess(served, log_path=Path(scratch) / "server.log", environment=environment())
            with server:
                command = [sys.executable, "-m", "vllm_overlay", "verify", server.url, *life]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            said += [line for line in done.stdout.splitlines() if line.startswith(("passed", "FAILED"))]
            if done.returncode:
                raise AssertionError(f"{said}: {done.stdout[-800:]}{done.stderr[-800:]}")
        return "; after a restart ".join(said)


def served_by(model: Path, device: str, config: Mapping[str, Any]) -> list[str]:
    """The arguments of vLLM's server. It stores what it has at SIGTERM."""
    arguments: dict[str, Any] = {"max_model_len": 8192, "mamba_ssm_cache_dtype": "float32", **on(device, CAREFUL)}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items() if value is not True]
    flags += ["--enforce-eager", "--enable-prefix-caching", "--shutdown-timeout=20"]
    return ["--model", str(model), *flags, "--kv-transfer-config", json.dumps(config)]


def ours_on_disk(root: Path, device: str) -> dict[str, Any]:
    """Our own copies, and the disk tier alone."""
    extra = {"tier": "disk", "root": str(root), "capacity_bytes": "1 GiB", "min_free_bytes": 0, "load_weight": 1.0}
    return {
        **CONNECTOR,
        "kv_connector_extra_config": {"connectors": [{**CPU_TIER, "kv_connector_extra_config": extra}]},
    }


def operators(_: Path, device: str) -> str:
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    both = torch.randn(4, 64, device=device, dtype=torch.bfloat16)
    out = torch.empty(4, 32, device=device, dtype=torch.bfloat16)
    torch.ops._C.silu_and_mul(out, both)
    wanted = torch.nn.functional.silu(both[:, :32].float()) * both[:, 32:].float()
    torch.testing.assert_close(out.float(), wanted, atol=0.05, rtol=0.02)
    if device == "cuda" and not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        raise AssertionError("swap_blocks_batch is not there")
    return "vLLM's compiled operators load, and silu_and_mul is right"


def platform(_: Path, device: str) -> str:
    import torch
    import vllm
    from vllm.platforms import current_platform

    if current_platform.device_type != device:
        raise AssertionError(f"vLLM's platform is {current_platform.device_type!r}")
    capability = current_platform.get_device_capability()
    return f"vLLM {vllm.__version__}, torch {torch.__version__}, {current_platform.get_device_name()}, {capability}"


def plain(model: Path, device: str) -> str:
    engine = Engine(model, device, **CAREFUL)
    tokens = prompt(2 * engine.block_size + 20, seed=1)
    (cold,), _ = engine.answers([tokens])
    (hit,), (num_cached,) = engine.answers([tokens])
    (again,), _ = engine.answers([tokens])
    if not num_cached or difference(hit, again) != 0:
        raise AssertionError(f"{num_cached} tokens hit in the device cache, and twice: {_far(difference(hit, again))}")
    said = f"{num_cached} of {len(tokens)} tokens hit in the device cache (N = {engine.block_size}), twice equal"
    return f"{said}; {_far(difference(cold, hit))} from the cold run"


def at_once(model: Path, device: str) -> str:
    engine = Engine(model, device, kv_transfer_config=CONNECTOR, async_scheduling=True, max_num_seqs=16, **FLASH)
    if (kind := type(engine.scheduler).__name__) != "AsyncScheduler":
        raise AssertionError(f"vLLM's scheduler is a {kind}")
    prompts = [prompt(300, number % 5) + prompt(100 + 50 * number, 10 + number) for number in range(NUM_REQUESTS)]
    first, _ = engine.answers(prompts)
    engine.evict()
    again, num_cached = engine.answers(prompts)
    if not any(num_cached):
        raise AssertionError("nothing was restored")
    same = sum(one[0] == other[0] for one, other in zip(first, again, strict=True))
    if same < 0.8 * NUM_REQUESTS:  # batches round, and near-ties fall otherwise
        raise AssertionError(f"only {same} of {NUM_REQUESTS} answers have the same tokens")
    return f"{same} of {NUM_REQUESTS} answers have the same tokens, {sum(map(bool, num_cached))} were restored"


def preempted(model: Path, device: str) -> str:
    """A KV cache for a few of many requests, and a CPU tier that evicts: blocks change hands all the time. Batches
    round, so an answer is judged by how far its tokens are from the best ones, computed anew and alone."""
    tier = {"tier": "cpu", "capacity_bytes": SMALL_BYTES, "load_weight": 1.0}
    children = {"connectors": [{**CPU_TIER, "kv_connector_extra_config": tier}]}
    engine = Engine(
        model,
        device,
        kv_transfer_config={**CONNECTOR, "kv_connector_extra_config": children},
        async_scheduling=True,
        max_num_seqs=16,
        kv_cache_memory_bytes=SMALL_BYTES,
        **FLASH,
    )
    preempt, preemptions = engine.scheduler._preempt_request, []
    engine.scheduler._preempt_request = lambda *request, **how: (
        preemptions.append(request),
        preempt(*request, **how),
    )
    prompts = [prompt(1200, number % 5) + prompt(100 + 40 * number, 10 + number) for number in range(NUM_REQUESTS)]
    said = []
    for _ in range(3):
        answers, num_cached = engine.answers(prompts, 200)
        engine.evict()
        far = max(engine.regret(tokens, answer) for tokens, (answer, _) in zip(prompts, answers, strict=True))
        if far > MAX_REGRET:
            raise AssertionError(f"an answer's token is {far:.2f} from the best one, computed alone")
        said.append(f"{sum(map(bool, num_cached))} restored, at most {far:.2f} from the best token")
    if not preemptions or not any(num_cached):
        raise AssertionError(f"{len(preemptions)} preemptions, restored {num_cached}")
    return f"{len(preemptions)} preemptions; {'; '.join(said)}"


def unit_of_64(model: Path, device: str) -> str:
    return restored(model, device, num_tokens=700, block_size=1088, prefix_match_unit=64, **CAREFUL)


# Without compilation: TORCHDYNAMO_DISABLE=1 leaves vLLM's none to run.
GRAPHS = {
    **FLASH,
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}

FAMILIES: dict[str, dict[str, Any]] = {
    "nemotron_h": {},
    "falcon_h1": {},
    "mamba2": {"block_size": 64},
    "lfm2": {},
    "gemma3": {},
    "qwen3": {"block_size": 64},
}
"""Without a mixture of experts, whose kernels the bundle leaves out."""

RUNGS = {
    "offloading": Rung("vLLM's OffloadingConnector over hybrid_disk: restored from the disk, flipped bits", from_disk),
    "below": Rung("the same below our MultiConnector", lambda model, device: from_disk(model, device, below_ours)),
    "restart": Rung(
        "the same as a server: verify, and verify after a restart",
        lambda model, device: after_restart(model, device, offloading),
    ),
    "operators": Rung("the compiled operators load and compute", operators),
    "platform": Rung("vLLM sees the device", platform),
    "plain": Rung("a tiny Qwen3.5 without a connector, eager, TRITON_ATTN, GDN prefill by Triton", plain),
    "connector": Rung(
        "our own copies and CPU tier: cold, evicted, restored twice, and with zeroed states",
        lambda model, device: restored(model, device, **CAREFUL),
    ),
    "disk": Rung(
        "our own copies and disk tier as a server: verify, and verify after a restart",
        lambda model, device: after_restart(model, device, ours_on_disk),
    ),
    "flash": Rung(
        "our own copies with FLASH_ATTN",
        lambda model, device: restored(model, device, **FLASH),
        why_not_cpu="the CPU platform has one attention backend",
    ),
    "graphs": Rung(
        "our own copies, decodes as full CUDA graphs",
        lambda model, device: restored(model, device, **GRAPHS),
        why_not_cpu="the CPU platform has no graphs",
    ),
    "asynchronous": Rung(
        f"our own copies, asynchronous scheduling, {NUM_REQUESTS} requests at once",
        at_once,
        why_not_cpu="the CPU platform switches asynchronous scheduling off",
    ),
    "unit": Rung("our own copies, --block-size 1088 --prefix-match-unit 64", unit_of_64),
    "preempted": Rung(
        f"our own copies, {NUM_REQUESTS} requests at once in a KV cache for few, and a CPU tier that evicts",
        preempted,
        why_not_cpu="a CPU takes longer than a rung may",
    ),
    "compiled": Rung(
        "our own copies, compiled and with graphs, as vLLM does by default",
        compiled,
        why_not_cpu="make test SUITE=compiled does that on a CPU",
    ),
    "v1": Rung(
        "our own copies, the V1 model runner (V2 is vLLM's choice where Triton is)",
        by_v1,
        why_not_cpu="the CPU platform has it anyway",
    ),
    "adapter": Rung("our own copies, with a LoRA adapter and without it", with_adapter),
    "image": Rung("our own copies, with an image and another one", with_image),
    "mtp": Rung("our own copies, with a module of multi-token prediction", speculating),
    **{name: Rung(f"our own copies, {name}", of_family(name, **arguments)) for name, arguments in FAMILIES.items()},
}
"""In the order of a ladder: what people with GPUs are to take comes first."""
