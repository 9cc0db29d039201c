# SPDX-License-Identifier: Apache-2.0
"""The patch series: what it holds, whether a vLLM has it, how it is applied and taken back.

Standard library only: no module here imports vLLM or torch. A tree is known by its root, the directory that holds
``vllm/``: site-packages, a checkout or an unpacked source distribution. Imports go one way, from ``cli`` over
``installed`` and ``tree`` to ``originals``, ``replace``, ``series`` and ``diff``; ``advice`` imports none of these.
"""
