"""Check that the nodes of a job can start together, and print the address of this node."""

import asyncio
import os
from collections.abc import Sequence

from ddp_trainer.commands.command_line import errors_as_exit_codes
from ddp_trainer.commands.options import parse_options
from ddp_trainer.config.errors import require
from ddp_trainer.launchers.node_check.client import ask_head
from ddp_trainer.launchers.node_check.node import NodeCheckOptions, describe_node, find_gpu_error
from ddp_trainer.launchers.node_check.server import wait_for_nodes


def main(words: Sequence[str]) -> None:
    """Print this node's address if all nodes can start together.

    Otherwise, exit with 2 for wrong input, and with 1 if a retry may succeed.
    """
    usage = "node-check option=value …"
    with errors_as_exit_codes():
        options, rest = parse_options(NodeCheckOptions, words, usage=usage, description=__doc__)
        require(not rest, f"{' '.join(rest)} is not an option of node-check: --help lists them")
        node = describe_node(options)
        # because torch prints stack traces if another program uses the port
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
        check = ask_head if node.node_rank else wait_for_nodes
        asyncio.run(check(node, find_gpu_error(node)))
    print(node.address)
