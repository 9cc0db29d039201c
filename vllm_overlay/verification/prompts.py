# SPDX-License-Identifier: Apache-2.0
"""Which prompts show whether a restore is right: those that end a few tokens after where one begins."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

PAST_BOUNDARY = 5
"""So few tokens are computed after the boundary: more would hide a wrong restore."""
TEXT = (
    "The cache keeps what a prompt has computed: keys and values of attention, and the states of recurrent layers. "
    "A second request with the same beginning goes on from there, and says what it would have said without it. "
    "0123456789 + - * / = ( ) [ ] { } one two three four five six seven eight nine ten eleven twelve"
)
"""Its tokens, in random order, make the prompts: every tokenizer has them, and none ends an answer."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """``boundary`` is the restore point, in tokens, that a second request with it must reach."""

    name: str
    tokens: tuple[int, ...]
    boundary: int


def boundaries(unit: int, chunk: int, block: int, longest: int) -> list[int]:
    """The multiples of ``unit`` to try, in tokens: the first ones, and those around a chunk and around blocks.

    None is above ``longest``.
    """
    around = [unit, 2 * unit, chunk - unit, chunk, chunk + unit]
    around += [size for block_end in (block, 2 * block) for size in (block_end - unit, block_end, block_end + unit)]
    return sorted({size - size % unit for size in around if unit <= size <= longest})


def make_prompts(
    alphabet: Sequence[int], unit: int, chunk: int, block: int, longest: int, seed: int, num_dropped: int = 0
) -> list[Prompt]:
    """One prompt a boundary and an extension of the longest, none of more than ``longest`` tokens.

    ``alphabet`` is the tokens to use, ``num_dropped`` those by which a hit is shorter. Raises ValueError if not even
    one prompt is so short.
    """
    source = random.Random(seed)
    past = min(PAST_BOUNDARY, unit) + num_dropped
    prompts = []
    for boundary in boundaries(unit, chunk, block, longest - past):
        tokens = tuple(source.choices(alphabet, k=boundary + past))
        prompts.append(Prompt(f"{len(tokens)} tokens", tokens, boundary))
    if not prompts:
        raise ValueError(f"restore points are {unit} tokens apart, and the server takes prompts of {longest} at most")
    return prompts


def extension(prompt: Prompt, alphabet: Sequence[int], num_tokens: int, seed: int) -> Prompt:
    """The prompt with so many tokens more. It restores what was stored of the first prompt."""
    tokens = (*prompt.tokens, *random.Random(seed).choices(alphabet, k=num_tokens))
    return Prompt(f"{len(tokens)} tokens, of which {len(prompt.tokens)} were sent before", tokens, prompt.boundary)
