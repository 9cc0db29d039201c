# SPDX-License-Identifier: Apache-2.0
"""Command lines of vLLM's server, up to where weights would be read: its own parser, its configuration, our checks.

``python -m tests.first_hour.start MODEL CASES ANSWERS``: CASES is a list of lists of arguments, ANSWERS of ``Answer``.
A process of its own, because vLLM changes what a process has only once.
"""

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import msgspec


class Answer(msgspec.Struct):
    """Either the sentence of a refusal, or the connector's class and the settings of each tier of ours."""

    refusal: str = ""
    connector: str = ""
    tiers: list[dict[str, Any]] = []
    weights: list[Any] = []


def main(model: str, cases: str, answers: str) -> None:
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", HOME="/home/somebody")
    found = [start(model, case) for case in msgspec.json.decode(Path(cases).read_bytes())]
    Path(answers).write_bytes(msgspec.json.encode(found))


def start(model: str, arguments: list[str]) -> Answer:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser = make_arg_parser(FlexibleArgumentParser())
            parsed = parser.parse_args(["--model", model, "--enforce-eager", *arguments])
        config = EngineArgs.from_cli_args(parsed).create_engine_config()
        return _taken(config.kv_transfer_config)
    except SystemExit:
        return Answer(refusal=said.getvalue())
    except Exception as error:
        return Answer(refusal=f"{type(error).__name__}: {error}")


def _taken(config: Any) -> Answer:
    """As the connector will read it once it is built."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from vllm_overlay.multi_connector.children import child_specs
    from vllm_overlay.tiers.factory import tier_spec

    cls = KVConnectorFactory.get_connector_class(config)
    extra = config.kv_connector_extra_config
    children = child_specs(extra, config.kv_role, None) if "vllm_overlay.multi" in cls.__module__ else []
    extras = [child.kv_transfer_config.kv_connector_extra_config for child in children] or [extra]
    return Answer(
        connector=f"{cls.__module__}.{cls.__name__}",
        tiers=[msgspec.to_builtins(tier_spec(one).settings) for one in extras if "tier" in one],
        weights=[child.settings.load_weight for child in children],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
