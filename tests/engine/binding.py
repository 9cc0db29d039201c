# SPDX-License-Identifier: Apache-2.0
"""What an engine with several ranks needs on a machine with one NUMA node."""

import os

BINDING = {"VLLM_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "0|0"}
"""vLLM binds ranks to NUMA nodes; a machine with one node must say which core is whose."""
