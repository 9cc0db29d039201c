# SPDX-License-Identifier: Apache-2.0
"""What the documentation is held to. Standard library alone, so that it runs without a set-up."""
