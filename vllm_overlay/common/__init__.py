# SPDX-License-Identifier: Apache-2.0
"""What several rooms use: locks, files, logs, pauses, and the words for what went wrong."""
