# SPDX-License-Identifier: Apache-2.0
"""Lets every Python process see a lesser processor than the machine's. ``make test PROCESSOR=avx2`` puts it in place.

vLLM picks its kernels, the dtype of recurrent states and with it the size of a block by what torch says of the
processor. Python imports a module of this name at start when its directory is on ``PYTHONPATH``, so API servers, engine
cores and workers are told alike. torch's own kernels, MKL's and oneDNN's are held back too. What the machine cannot do
stays undone: ``avx512`` on a processor with AVX2 alone is AVX2.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType

VARIABLE = "TEST_PROCESSOR"

HIDDEN = {
    "avx2": ("avx512", "avx10", "amx"),
    "avx512": ("avx512_bf16", "avx512_fp16", "avx10", "amx"),
    "avx512_bf16": ("avx512_fp16", "avx10", "amx"),
}
"""What each processor lacks: beginnings of the names in ``torch.cpu.get_capabilities()``."""

LIBRARIES = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
    },
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "TORCHINDUCTOR_CPP_MARCH": "native",
    },
    "avx512_bf16": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "TORCHINDUCTOR_CPP_MARCH": "native",
    },
}
"""How torch's own kernels, MKL's and oneDNN's are told; each reads its variable once.

What torch compiles follows the first of them, but its cache does not: without the last, AVX2 would find the code of
AVX-512 there, which strides over 16 numbers, build it with vectors of 8, and leave every other eight numbers undefined.
"""


def without(capabilities: Mapping[str, object], hidden: tuple[str, ...]) -> Mapping[str, object]:
    """``capabilities`` with a plain no for those whose names begin with one of ``hidden``."""
    return MappingProxyType(
        {name: False if name.startswith(hidden) else answer for name, answer in capabilities.items()}
    )


class LesserTorch:
    """A finder that changes ``torch.cpu`` right after it is executed; every capability is asked for there."""

    def __init__(self, processor: str) -> None:
        self._hidden = HIDDEN[processor]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch.cpu" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_hide(module: ModuleType) -> None:
            execute(module)
            capabilities = without(module.get_capabilities(), self._hidden)
            module.get_capabilities = lambda: capabilities  # type: ignore[attr-defined]

        spec.loader.exec_module = execute_and_hide  # type: ignore[method-assign]
        return spec


def main(processor: str) -> None:
    """Ends the process when there is no such processor."""
    if processor not in HIDDEN:
        sys.exit(f"{VARIABLE}={processor}: known are {', '.join(HIDDEN)}")
    os.environ.update(LIBRARIES[processor])
    sys.meta_path.insert(0, LesserTorch(processor))  # type: ignore[arg-type]


if __name__ == "sitecustomize" and VARIABLE in os.environ:
    main(os.environ[VARIABLE])
