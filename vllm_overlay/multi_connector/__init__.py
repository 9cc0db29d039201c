# SPDX-License-Identifier: Apache-2.0
"""Several KV connectors as one: the best offer loads, every child stores, no child can take the others down.

It needs nothing else of this package's caches: children are known through vLLM's connector interface alone. Use it as
``{"kv_connector": "MultiConnector", "kv_connector_module_path": "vllm_overlay.multi_connector", ...}``, or as
``WeightedMultiConnector`` where the plugin is installed. ``connector.py`` has the table of how answers are merged.
"""

from vllm_overlay.multi_connector.connector import MultiConnector

__all__ = ["MultiConnector"]
