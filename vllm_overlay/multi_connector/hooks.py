# SPDX-License-Identifier: Apache-2.0
"""The hooks of vLLM's connector interface that a MultiConnector calls of a child once it serves, by introspection."""

import inspect

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

LOOKUP = "get_num_new_matched_tokens"
"""The hook that a request waits for before it is scheduled."""

NOT_CALLED = {
    "role": "the same as our own",
    "has_connector_metadata": "says whether ours is bound, and ours holds the children's",
    "get_finished": "get_transfer_results is asked",
    "get_finished_count": "asked at start",
    "get_mem_pool_context": "asked at start",
    "requires_kv_delivery": "asked at start",
    "bind_gpu_block_pool": "called at start; an instance that comes back gets it with bind_kv_cache_manager",
    "set_xfer_handshake_metadata": "called at start; an instance that comes back gets the other form of it",
}
"""Hooks that no instance of a child meets while it serves or comes back, and why. A failure at start is a refusal."""


def _hooks() -> tuple[str, ...]:
    names = {name for cls in (KVConnectorBase_V1, SupportsHMA) for name in dir(cls) if not name.startswith("_")}
    of_the_class = {
        name
        for name in names
        for cls in (KVConnectorBase_V1, SupportsHMA)
        if isinstance(inspect.getattr_static(cls, name, None), classmethod)
    }
    return ("__init__", *sorted(names - of_the_class - NOT_CALLED.keys()))


_MAY_BE_EMPTY = frozenset(
    {
        *("wait_for_layer_load", "save_kv_layer", "handle_preemptions", "finish_forward", "reset_capture_state"),
        *("get_kv_connector_kv_cache_events", "build_connector_worker_meta", "get_kv_connector_stats"),
        *("on_new_request", "update_connector_output", "take_events"),
        *("has_pending_push_work", "has_pending_block_frees"),
    }
)
"""Hooks that many connectors have no use for. Those that vLLM's interface does not leave to them do nothing there."""


def empty_hooks(connector: object) -> frozenset[str]:
    """Hooks that this instance has from vLLM's interface, or that are marked ``empty_hook``. They need not be called,
    and an engine calls some of them for each layer of each step. Runs no code of the connector."""
    own = {name: inspect.getattr_static(connector, name, None) for name in _MAY_BE_EMPTY}
    return frozenset(
        name
        for name, method in own.items()
        if method is vars(KVConnectorBase_V1)[name] or getattr(method, "is_empty_hook", False) is True
    )


HOOKS = _hooks()
"""The values of the metric label ``hook``. ``__init__`` is the construction of an instance that comes back."""
