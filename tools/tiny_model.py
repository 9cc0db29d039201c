# SPDX-License-Identifier: Apache-2.0
"""Makes the tiny model of demo and tests, with random weights: Qwen3.5 (three GDN layers, one full attention).

Other architectures are in tests/models; they share what is public here.

A plain random model forgets its recurrent state within a few tokens and hardly looks at its attention: a restore of
zeros would pass unnoticed. The factors below make it remember and look, so that a wrong restore changes its output.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

VOCAB_SIZE = 1024
DEFAULT_CONTEXT_TOKENS = 8192


def configuration(context_tokens: int, num_layers: int) -> dict[str, object]:
    """Fields of a configuration of transformers, that of any family with GDN layers."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": context_tokens,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def remember_and_look(model) -> None:
    """Changes weights in place: slow decay and strong input for the states, sharp attention, no near-ties."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-7.0)
            elif name.endswith("dt_bias"):
                parameter.zero_()
    sharpen(model)
    scale(
        model,
        {
            "in_proj_qkv": 4.0,
            "in_proj_z": 4.0,
            "in_proj_b": 4.0,
            "in_proj_a": 4.0,
            "linear_attn.out_proj": 8.0,
            "v_proj": 8.0,
            "o_proj": 16.0,
            "lm_head": 8.0,
        },
    )


def sharpen(model) -> None:
    """Attention looks at few tokens."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.add_(1.0)


def scale(model, factors: dict[str, float]) -> None:
    """Multiplies the weights whose names have a part."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for part, factor in factors.items():
                if part in name:
                    parameter.mul_(factor)


def add_draft_head(model) -> None:
    """A module of multi-token prediction as Qwen3.5 and Qwen3-Next have it, for ``--speculative-config`` with mtp: it
    has its last layer's shapes, and drafts what the model hardly ever says."""
    import copy

    import torch

    head, hidden = torch.nn.Module(), model.config.hidden_size
    head.layers = torch.nn.ModuleList([copy.deepcopy(model.model.layers[-1])])
    head.fc = torch.nn.Linear(2 * hidden, hidden, bias=False, dtype=torch.bfloat16)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        setattr(head, name, copy.deepcopy(model.model.norm))
    with torch.no_grad():
        for parameter in head.layers.parameters():
            parameter.copy_(parameter.flatten()[torch.randperm(parameter.numel())].view_as(parameter))
    model.mtp = head
    model.config.mtp_num_hidden_layers = 1


def _save_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer: token b is byte b; the ids above 255, which only a random model says, are named."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = [AddedToken(f"<{index}>", normalized=False) for index in range(len(vocab), VOCAB_SIZE)]
    tokenizer.add_tokens(names)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False).save_pretrained(directory)


def make_tiny_model(
    directory: Path,
    *,
    context_tokens: int = DEFAULT_CONTEXT_TOKENS,
    seed: int = 0,
    nudge: float = 0.0,
    num_layers: int = 4,
    has_draft_head: bool = False,
) -> Path:
    """Writes the Qwen3.5 model and a tokenizer to ``directory`` unless they are there; atomic. Returns ``directory``.

    ``nudge`` is added to one single weight: two models of one name and shape that must never share a cache. Every
    fourth layer has attention: with more than ``num_layers`` = 4, states depend on attention too.
    ``has_draft_head``: see ``add_draft_head``.
    """

    def make():
        import torch
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        torch.manual_seed(seed)
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**configuration(context_tokens, num_layers))).to(torch.bfloat16)
        remember_and_look(model)
        if nudge:
            with torch.no_grad():
                model.lm_head.weight[0, 0] += nudge
        if has_draft_head:
            add_draft_head(model)
        return model

    return write_model(directory, make)


def write_model(directory: Path, make) -> Path:
    """What ``make`` returns, with a tokenizer, appears in ``directory`` at once or not at all."""
    if (directory / "config.json").exists():
        return directory
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        model = make()
        model.config.architectures = [type(model).__name__]
        model.save_pretrained(scratch)
        _save_tokenizer(scratch)
        if not directory.exists():
            scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def main() -> None:
    """The command line: one directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where to write the model (kept if it is there)")
    parser.add_argument("--context-tokens", type=int, default=DEFAULT_CONTEXT_TOKENS, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default: %(default)s)")
    arguments = parser.parse_args()
    print(make_tiny_model(arguments.directory, context_tokens=arguments.context_tokens, seed=arguments.seed))


if __name__ == "__main__":
    main()
