# SPDX-License-Identifier: Apache-2.0
"""HybridOffloadConnector: the vLLM connector that serves one tier."""
