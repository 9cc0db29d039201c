# SPDX-License-Identifier: Apache-2.0
"""What a child's offered tokens are worth: one file a rule, each named by the setting ``selection``."""
