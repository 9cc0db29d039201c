# SPDX-License-Identifier: Apache-2.0
"""The disk tier behind vLLM's own OffloadingConnector, whose copies run on GPUs."""
