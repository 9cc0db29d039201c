# SPDX-License-Identifier: Apache-2.0
"""Settings as people and charts write them: read, or refused with a sentence that names a value that works."""
