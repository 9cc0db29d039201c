# SPDX-License-Identifier: Apache-2.0
"""Measurements. Nothing here is a test: no figure is asserted."""
