# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: the names that their weights give to objects, and the digests of what is loaded."""
