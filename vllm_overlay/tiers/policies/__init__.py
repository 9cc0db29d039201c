# SPDX-License-Identifier: Apache-2.0
"""Which objects a full tier gives up first."""
