# SPDX-License-Identifier: Apache-2.0
"""A table of models: what each restores from where, compared with engines that have no cache."""
