# SPDX-License-Identifier: Apache-2.0
"""Proves on a running server that what tiers restore equals what is computed."""
