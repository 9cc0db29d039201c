# SPDX-License-Identifier: Apache-2.0
"""Bytes between the engine's KV tensors and host buffers."""
