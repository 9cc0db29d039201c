# SPDX-License-Identifier: Apache-2.0
"""Tiny models of other architectures than the demo's, with random weights: one file a family."""
