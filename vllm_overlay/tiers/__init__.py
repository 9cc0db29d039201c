# SPDX-License-Identifier: Apache-2.0
"""Places that keep chunks and snapshots. No torch in any module of this package."""
