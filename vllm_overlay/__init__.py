# SPDX-License-Identifier: Apache-2.0
"""vllm-overlay: hybrid KV offload for vLLM, an overlay package for the one vLLM version named in VLLM_VERSION."""

from vllm_overlay.versions import PACKAGE as __version__
from vllm_overlay.versions import VLLM as VLLM_VERSION

__all__ = ["VLLM_VERSION", "__version__"]
