# SPDX-License-Identifier: Apache-2.0
"""What to restore and what to store. Pure Python: no torch, no vLLM."""
