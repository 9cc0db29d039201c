# SPDX-License-Identifier: Apache-2.0
"""Every version of this package: its own, vLLM's, and those of what it leaves on disk.

A format's version goes up with any change after which older bytes mean something else. It is part of the names or of
the headers that hold those bytes, so what another version wrote is a miss and never a wrong hit.
"""

PACKAGE = "0.3.0"
"""Semantic version of vllm-overlay."""

VLLM = "0.32.0"
"""The vLLM that the patch series and the connectors are made for."""

DISK_ROOT = 1
"""The marker of a root, and where everything lies under it (docs/disk-format.md). A later one is refused."""

DISK_OBJECT = 1
"""Header and payload of an object's file (docs/disk-format.md)."""

CATALOGUE = 1
"""The tables of a root's catalogue. One of another version is made anew from the objects' files."""

FINGERPRINT = 1
"""Which facts decide that stored numbers may be used (connector/fingerprint.py)."""

LEARNED = 1
"""What an eviction policy has learned, in a namespace's directory (docs/disk-format.md). Another one is not read."""

WEIGHT_DIGESTS = 1
"""The digests of weights under a root (connector/digest_cache.py)."""
