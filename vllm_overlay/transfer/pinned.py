# SPDX-License-Identifier: Apache-2.0
"""Host memory registered with CUDA, so that the device copies from and to it by itself. Run on one GPU (docs/gpu.md).

The memory stays anonymous: after a SIGKILL nothing of it is left anywhere. The driver's own functions are called,
because an error of theirs is only their result. torch's next kernel would raise an error of the runtime's again.
"""

import ctypes
import logging
import math
from typing import Any

from vllm_overlay.tiers.memory import PAGE_BYTES, Bytes

logger = logging.getLogger(__name__)

MAX_PART_BYTES = 16 << 30


class PinnedMemory:
    """A pool's memory, registered in parts; all of them, or none when the driver refuses one.

    Parts end where both a unit and a page end: no unit lies in two of them. Unregister it only when no copy is under
    way (``CudaTransfer.close`` said True), and before the memory goes.

    Args:
        array: Rows of a ``HostPool``, (units, bytes a unit), page-aligned.
        max_part_bytes: Of one registration. At least a unit and a page fit into it.
        library: Stands for the CUDA driver's in tests.

    Raises:
        OSError: There is no CUDA driver.
    """

    def __init__(self, array: Bytes, *, max_part_bytes: int = MAX_PART_BYTES, library: Any = None) -> None:
        self._library = library if library is not None else ctypes.CDLL("libcuda.so.1")
        self._library.cuMemHostRegister_v2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._library.cuMemHostUnregister.argtypes = (ctypes.c_void_p,)
        self._parts: list[int] = []
        """Addresses of those that are registered."""
        self.is_pinned = self._register(array, max_part_bytes)

    def unregister(self) -> None:
        """Make it ordinary memory again. Called at shutdown. A second call does nothing."""
        while self._parts:
            self._library.cuMemHostUnregister(self._parts.pop())
        self.is_pinned = False

    def _register(self, array: Bytes, max_part_bytes: int) -> bool:
        border = math.lcm(array.shape[1], PAGE_BYTES)
        part_bytes = max(1, max_part_bytes // border) * border
        for start in range(0, array.nbytes, part_bytes):
            size = min(part_bytes, array.nbytes - start)
            if result := self._library.cuMemHostRegister_v2(array.ctypes.data + start, size, 0):
                self.unregister()
                logger.warning(
                    "the CUDA driver refuses to register %.1f GiB of host memory (error %d at %.1f GiB). Copies go on "
                    "slowly, and stores hold up steps: set a smaller capacity or a higher memlock limit",
                    array.nbytes / 2**30,
                    result,
                    start / 2**30,
                )
                return False
            self._parts.append(array.ctypes.data + start)
        return True
