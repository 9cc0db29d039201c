# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of its MultiConnector (0.32.0), unchanged, against our class.

NIXL's library need not be there: vLLM's tests put a fake in its place. They are in vLLM's source distribution alone:
VLLM_SOURCE names one that is unpacked.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.python_path import python_path

UNIT = Path("tests/v1/kv_connector/unit")
FILES = ("__init__.py", "conftest.py", "utils.py")
PASSING = {"test_multi_connector.py": 29, "test_nixl_simple_cpu_offload.py": 4}
"""Files with the numbers of their tests that pass without a GPU, with either class."""

KNOWN = {
    "test_multi_connector_overrides_all_base_methods": "patch 0012 gives the base class a method more",
    "test_build_kv_connector_stats_raises_error_for_unknown_connector": "patch 0011 lets names be unknown",
}
"""Of vLLM's own class with our series: what fails and why (docs/patches.md)."""


def make_llama(directory: Path) -> Path:
    """A tiny Llama with a tokenizer of words, in place of the models of vLLM's tests."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<unk>", "</s>", "Hi", *map(chr, range(33, 127))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=16384,
        bos_token_id=None,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def run_upstream(workplace: Path, source: Path, whose: str, tests: str) -> tuple[dict[str, int], str]:
    """Numbers of outcomes of one file, and the output, against "ours" or the "shipped" class."""
    for file in (*FILES, tests):
        (workplace / UNIT).mkdir(parents=True, exist_ok=True)
        shutil.copy(source / UNIT / file, workplace / UNIT / file)
    for package in (UNIT.parent, UNIT.parent.parent, Path("tests")):
        (workplace / package / "__init__.py").touch()
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(workplace, workplace / "shim"),
        "UPSTREAM_MODEL": str(make_llama(workplace / "llama")),
        "UPSTREAM_MULTI_CONNECTOR": whose,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TMPDIR": str(workplace),
    }
    # Alone in a directory: beside it lies our own package "tests".
    (workplace / "shim").mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("upstream_shim.py"), workplace / "shim")
    command = [sys.executable, "-m", "pytest", "-p", "upstream_shim", "-p", "no:cacheprovider", "-q", "-rA"]
    ran = subprocess.run(
        [*command, str(UNIT / tests)], cwd=workplace, env=environment, text=True, capture_output=True, timeout=500
    )
    output = ran.stdout + ran.stderr
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", output.rsplit("\n=", 1)[-1] + output.splitlines()[-1])
    return {what: int(number) for number, what in counts}, output


@pytest.mark.upstream
@pytest.mark.engine
@pytest.mark.parametrize("tests", PASSING)
@pytest.mark.parametrize("whose", ["ours", "shipped"])
def test_vllms_own_tests_pass_against_our_class_as_against_vllms(tmp_path: Path, whose: str, tests: str) -> None:
    outcomes, output = run_upstream(tmp_path, Path(os.environ["VLLM_SOURCE"]), whose, tests)
    failed = set(re.findall(r"^FAILED \S+::(\w+)", output, flags=re.MULTILINE))
    assert failed <= (KNOWN.keys() if whose == "shipped" else set()), output[-8000:]
    assert outcomes.get("passed", 0) + len(failed) == PASSING[tests] and not outcomes.get("error"), output[-8000:]
