# SPDX-License-Identifier: Apache-2.0
"""Hybrid KV offload for vLLM: an overlay package for the one vLLM version named in VLLM_VERSION."""

__version__ = "0.1.0"
VLLM_VERSION = "0.32.0"
