# SPDX-License-Identifier: Apache-2.0
"""Which cosines an engine's process computes first: those of a table, with several threads, or one alone.

What several threads get wrong is seen once in hundreds of starts, so it is not waited for. With a number, that many
processes compute a table, and the wrong ones are counted, without and with a cosine before it.
"""

import math
import os
import sys

import torch

SYMPTOM = "the process's first cosines are those of the rotary table, which two threads compute at once"


def main() -> None:
    from tests.patches.lab import Lab, conclude

    sizes: list[int] = []
    cos = torch.Tensor.cos

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return cos(tensor)

    torch.Tensor.cos = seen  # type: ignore[method-assign, assignment]
    Lab()
    is_alone, has_table = sizes[0] == 1, max(sizes) > 2048  # torch gives a thread so many
    conclude(has_table and not is_alone, has_table and is_alone, sizes=sizes)


def count_wrong_tables(num_processes: int) -> None:
    angles = torch.tensor([position / 10**dimension for position in range(8192) for dimension in range(4)])
    cosines = torch.tensor([math.cos(angle) for angle in angles.tolist()])

    def is_wrong(has_first: bool) -> bool:
        torch.set_num_threads(4)
        if has_first:
            torch.zeros(1).cos()
        return bool((angles.cos() - cosines).abs().max() > 1e-5)

    wrong = [0, 0]
    for turn in range(2 * num_processes):
        if not (child := os.fork()):
            os._exit(is_wrong(has_first=turn % 2 == 1))
        wrong[turn % 2] += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"wrong of {num_processes}: {wrong[0]}, with one cosine alone before {wrong[1]}")


if __name__ == "__main__":
    count_wrong_tables(int(sys.argv[1])) if sys.argv[1:] else main()
