# SPDX-License-Identifier: Apache-2.0
"""What a resend must restore, and that its output is the one that was computed."""

from tests.engine.bar import BAR
from tests.engine.client import Engine, Output
from tests.engine.states import TOKEN_BYTES, States

U = 64


def restorable(num_tokens: int) -> int:
    """What an identical resend must restore at least."""
    return (num_tokens - 1) // U * U


def restored_bytes(states: States, num_tokens: int) -> int:
    """What a restore of a prompt of so many tokens loads: all it can of the attention, and one snapshot."""
    return restorable(num_tokens) * TOKEN_BYTES + states.num_bytes if restorable(num_tokens) else 0


def assert_restored(cold: Output, restored: Output, num_tokens: int) -> None:
    assert restored.num_cached_tokens >= restorable(num_tokens)
    assert restored.same_as(cold), (num_tokens, cold, restored)


def assert_restores(engine: Engine, cold: Output, tokens: list[int]) -> None:
    """As ``assert_restored`` of the prompt. Of a wrong answer it tells whether the same blocks give it once more: then
    they hold wrong bytes, and else computing was not the same."""
    restored = engine.generate(tokens)
    assert restored.num_cached_tokens >= restorable(len(tokens))
    assert restored.same_as(cold), (len(tokens), cold, restored, "the same blocks again:", engine.generate(tokens))


def assert_restored_in_a_batch(cold: Output, restored: Output, num_tokens: int) -> None:
    """As ``assert_restored``, of a request that was served beside others: on some processors kernels round by the
    batch, and decide near-ties otherwise. After such a token nothing can be compared."""
    assert restored.num_cached_tokens >= restorable(num_tokens)
    for place, (token, other) in enumerate(zip(cold.token_ids, restored.token_ids, strict=True)):
        assert abs(cold.logprobs[place] - restored.logprobs[place]) <= BAR, (num_tokens, cold, restored)
        if token != other:
            return
