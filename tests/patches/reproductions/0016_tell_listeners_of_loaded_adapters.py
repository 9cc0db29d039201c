# SPDX-License-Identifier: Apache-2.0
"""An adapter's files change, and it is loaded in place; the connector forgets what it has when it hears of that."""

import os
import tempfile
from pathlib import Path

import torch
from vllm import SamplingParams
from vllm.lora import worker_manager
from vllm.lora.request import LoRARequest

from tests.adapters import RANK, make_adapter
from tests.patches.lab import Lab, LabConnector, conclude, prompt

SYMPTOM = "after new weights were loaded in place, a connector restores what the old ones have computed"


def main() -> None:
    lab = Lab(enable_lora=True, max_lora_rank=RANK)
    heard: list[torch.Tensor] = []

    def forget(request: LoRARequest, model: object) -> None:
        heard.append(model.loras["model.layers.3.mlp.down_proj"].lora_b)  # type: ignore[attr-defined]
        LabConnector.snapshots.clear()

    getattr(worker_manager, "adapter_load_listeners", []).append(forget)
    parameters = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def run(tokens: list[int], adapter: LoRARequest) -> tuple[list[int], int]:
        (output,) = lab.llm.generate({"prompt_token_ids": tokens}, parameters, lora_request=adapter, use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    tokens = prompt(300, seed=1)
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as directory:
        adapter = LoRARequest("one", 1, str(make_adapter(Path(directory) / "one", seed=1)))
        old, _ = run(tokens, adapter)
        lab.reset()
        restored, hit = run(tokens, adapter)
        make_adapter(Path(directory) / "one", seed=2)
        lab.engine.add_lora(LoRARequest("one", 1, adapter.lora_path, load_inplace=True))
        lab.reset()
        after, hit_after = run(tokens, adapter)
        lab.reset()
        LabConnector.answer = lambda *_: (0, False)
        new, _ = run(tokens, adapter)
    sound = restored == old and hit == 256 and new != old
    seen = {"old": old, "new": new, "after": after, "hits": [hit, hit_after], "heard": len(heard)}
    changed = len(heard) == 2 and not torch.equal(*heard)
    conclude(sound and hit_after == 256 and after != new, sound and changed and hit_after == 0 and after == new, **seen)


if __name__ == "__main__":
    main()
