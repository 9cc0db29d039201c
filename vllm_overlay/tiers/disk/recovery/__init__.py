# SPDX-License-Identifier: Apache-2.0
"""What no living engine does: a lost catalogue, dead writers; and what people ask of a root."""
