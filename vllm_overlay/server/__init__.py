# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI-compatible server, from outside: its process and its HTTP interface. Needs neither torch nor vLLM."""
