# SPDX-License-Identifier: Apache-2.0
"""The V2 model runner and OffloadingConnector: a prompt takes the blocks of one that ended in the step before."""

import os
import sys

from tests.engine.interpreted_triton import V2_RUNNER, install

SYMPTOM = "blocks that the next step has zeroed are stored under the hash of what was there: wrong tokens"


def main() -> None:
    from tests.patches.lab import Lab, N, conclude, near, prompt
    from tests.patches.speculation import MATCH_UNIT

    longest = 5 * N
    lab = Lab(
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTiering",
                "spec_module_path": "tests.multi_connector.third_party",
                "cpu_bytes_to_use": 10_000_000,
            },
        },
        num_gpu_blocks_override=1 + 5 + 2 * 3,  # the null block, attention, and two states of each other group
        max_model_len=longest,
        max_num_batched_tokens=longest,
        prefix_match_unit=MATCH_UNIT,
    )
    # The state of the last unit is copied, and to be stored, in the last step of the first prompt.
    tokens, hit = prompt(2 * N + 20, seed=1), 2 * N - MATCH_UNIT
    lab.run(tokens[: 2 * N], max_tokens=1)
    lab.run(prompt(longest - 1, seed=2), max_tokens=1)
    lab.reset()
    (loaded,) = lab.run(tokens)
    lab.reset_all()
    (computed,) = lab.run(tokens)
    lab.engine.engine_core.shutdown()  # which says something
    hits, is_right = [loaded["cached"], computed["cached"]], near(loaded, computed)
    conclude(
        hits == [hit, 0] and not is_right,
        hits == [hit, 0] and is_right,
        hits=hits,
        tokens=[loaded["tokens"], computed["tokens"]],
    )


if __name__ == "__main__":
    if "VLLM_USE_V2_MODEL_RUNNER" not in os.environ:  # nor may the process have imported Triton
        os.execve(sys.executable, [sys.executable, __file__], {**os.environ, **V2_RUNNER["environment"]})
    install()
    main()
