# SPDX-License-Identifier: Apache-2.0
"""The disk tier: one verified file an object, under one root, shared by processes."""
