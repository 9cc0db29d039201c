# SPDX-License-Identifier: Apache-2.0
"""Recovery in each server, and what ``stats`` says of a root, also while others serve it."""
