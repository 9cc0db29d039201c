# SPDX-License-Identifier: Apache-2.0
"""What lies under a root: its marker, its namespaces, the objects' files and their format."""
