# SPDX-License-Identifier: Apache-2.0
"""What the patch series is made of: unified diffs, all-or-nothing file replacement, the command line."""
