# SPDX-License-Identifier: Apache-2.0
"""For maintainers: what is neither shipped nor a test."""
