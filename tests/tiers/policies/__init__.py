# SPDX-License-Identifier: Apache-2.0
"""Tests of what a full tier gives up first."""
