# SPDX-License-Identifier: Apache-2.0
"""What the commands ``fsck``, ``gc`` and ``stats`` run: an operator's work on a root, also while others serve it."""
