# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 with its vision tower: images between the text, in front of recurrent states and attention."""

from pathlib import Path

from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, VOCAB_SIZE, configuration, remember_and_look, write_model

IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = range(VOCAB_SIZE - 4, VOCAB_SIZE)
PATCH_PIXELS = 16
MERGED_PATCHES = 2
TOKEN_PIXELS = PATCH_PIXELS * MERGED_PATCHES
"""An image of a x b such pixels is (a x b) / this squared tokens."""


def make_qwen3_5_vl(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes the tiny model with a vision tower of two layers, and its processor, as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

        text = configuration(context_tokens, 4)
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        config = Qwen3_5Config(
            text_config={**text, "rope_parameters": {**rope, "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
            vision_config={
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 2,
                "out_hidden_size": text["hidden_size"],
                "patch_size": PATCH_PIXELS,
                "spatial_merge_size": MERGED_PATCHES,
                "temporal_patch_size": 2,
                "num_position_embeddings": 256,
            },
            image_token_id=IMAGE_TOKEN,
            video_token_id=VIDEO_TOKEN,
            vision_start_token_id=VISION_START,
            vision_end_token_id=VISION_END,
        )
        torch.manual_seed(0)
        model = Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16)
        remember_and_look(model)
        return model

    write_model(directory, make)
    if not (directory / "preprocessor_config.json").exists():
        _save_processor(directory)
    return directory


def _save_processor(directory: Path) -> None:
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    names = {
        "image_token": IMAGE_TOKEN,
        "video_token": VIDEO_TOKEN,
        "vision_bos_token": VISION_START,
        "vision_eos_token": VISION_END,
    }
    special = {name: f"<{token}>" for name, token in names.items()}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, extra_special_tokens=special)
    sizes = {"patch_size": PATCH_PIXELS, "merge_size": MERGED_PATCHES, "temporal_patch_size": 2}
    limits = {"size": {"shortest_edge": TOKEN_PIXELS**2, "longest_edge": 1024 * TOKEN_PIXELS**2}}
    images, videos = Qwen2VLImageProcessor(**sizes, **limits), Qwen3VLVideoProcessor(**sizes, **limits)
    Qwen3VLProcessor(images, tokenizer, videos).save_pretrained(directory)
    images.save_pretrained(directory)
