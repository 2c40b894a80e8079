"""The node check on the other nodes: each reports to the head, compares itself with it, and reads the result."""

import random
import secrets
import socket
import time
from contextlib import closing
from dataclasses import replace

from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.launch.network import check_port, is_loopback, listen
from ddp_trainer.launch.node_check import RDZV_ID, NodeInfo, PortTakenError, messages
from ddp_trainer.launch.node_check.messages import HEAD, NODE, READ, READY, START, Board, Message

CLOCK_SECONDS = 5.0
"""How far clocks may be apart: torchrun takes a node whose clock is 15 s behind for dead."""
OTHERS_SECONDS = 5.0
"""How long a node that finds another program, or a head with another key, waits for its own head to take its place."""


def ask_head(node: NodeInfo, error: ConfigError | None) -> None:
    """Return when all nodes can start, or this elastic job is running; raise why not. `error` is this node's own."""
    report = Message(
        nonce="", nodes={secrets.token_hex(8): str(node.node_rank)}, address=node.address, port=0, time=time.time(),
        result=messages.encode_error(node.named(error)) if error else "",
    )  # fmt: skip
    key, result, deadline = node.key(), "", time.monotonic() + node.timeout
    while not result:
        try:
            result = attempt(node, report, key)
        except (TransientError, ConfigError) as failure:
            if isinstance(failure, (PortTakenError, ConfigError)):
                deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
            if time.monotonic() > deadline:
                raise node.named(error or failure) from None
            time.sleep(0.3)
    messages.check_result(result)


def attempt(node: NodeInfo, report: Message, key: bytes) -> str:
    """Connect to the head and return its result; what this raises may be different the next time."""
    try:
        socket.create_connection(node.head, timeout=4).close()  # the kernel needs 3 s to find that no host is there
    except OSError as error:
        raise no_connection(node, error) from None
    try:
        board = Board(messages.open_store(node.head), key)
    except OSError:
        raise node.port_taken("another program") from None
    try:
        if not board.read(HEAD):
            return join_running_job(node, board, report)
        with closing(listen(node.address, 0)) as own_port:
            return follow(node, board, replace(report, port=own_port.getsockname()[1]))
    except OSError:
        raise TransientError(
            f"the head at {node.head[0]} has ended before all nodes had come: see its output"
        ) from None


def follow(node: NodeInfo, board: Board, report: Message) -> str:
    """Exchange messages with the head and return its result; OSError if the store is gone."""
    end, known_as = time.monotonic() + 2 * node.timeout, {}
    while time.monotonic() < end:
        head = board.read(HEAD, nodes=known_as)
        if head and report.nodes.items() <= head.nodes.items():
            known_as = report.nodes  # from now on: a message without them is one of an earlier start
            report = replace(report, result=report.result or compare(node, head, asked=report.time))
        if head:
            result = head.result if known_as else ""
            message = replace(report, nonce=head.nonce, result=READ if result else report.result)
            board.publish(f"{NODE}{node.node_rank}", message, nonce=head.nonce)
            if result:
                is_own = result in (START, report.result)
                return result if is_own else f"{result[:2]}node {node.node_rank}: stopped by the head: {result[2:]}"
        time.sleep(random.uniform(0.05, 0.15))  # not in step with another node of the same rank
    raise TransientError(f"the head at {node.head[0]} does not answer: is it still up?")


def compare(node: NodeInfo, head: Message, *, asked: float) -> str:
    """Return READY, or the error that keeps this node from starting with the head.

    The head has sent its message after `asked` and before now, by this node's clock.
    """
    uncertainty = (time.time() - asked) / 2
    behind = head.time - asked - uncertainty
    try:
        node.check_settings(head.settings)
        if abs(behind) > CLOCK_SECONDS + uncertainty:
            raise TransientError(
                f"its clock is {abs(behind):.0f} s {'behind' if behind > 0 else 'ahead of'} the head's, and torchrun "
                "takes a node that is 15 s behind for dead: set the clocks of all nodes (chrony or ntp)"
            )
        check_port(node.head[0], head.port, "it cannot reach the head")
    except (ConfigError, TransientError) as error:
        return messages.encode_error(node.named(error))
    return READY


def join_running_job(node: NodeInfo, board: Board, report: Message) -> str:
    """Return START if this elastic job is running; raise why else the store has no message for this node."""
    if head := board.read_untrusted(HEAD):
        board.publish(f"{NODE}{node.node_rank}", report)
        node.check_settings(head.settings)
        raise ConfigError("the messages of the head cannot be verified: does another program write to its store?")
    if node.is_elastic and board.get(f"torch.rendezvous.{node.config[RDZV_ID]}"):
        time.sleep(1)
        if not board.read(HEAD):  # otherwise another program has written to the head's store
            return START
    raise node.port_taken("the rendezvous of another job")


def no_connection(node: NodeInfo, error: OSError) -> TransientError:
    """Return the error that the head cannot be reached."""
    target, seconds = "{}:{}".format(*node.head), f"{node.timeout:.0f} s"
    if isinstance(error, ConnectionError):
        hint = ", and that is each host's own address" if is_loopback(node.head[0]) else ""
        text = f"nothing listened at {target} for {seconds}{hint}: start node 0 there within {seconds} of this node"
    elif isinstance(error, TimeoutError):
        text = f"{target} does not answer, packets are dropped: let the firewalls on the way pass this port"
    else:
        text = f"{target} cannot be reached ({error.strerror}): is the head up, and does ip route lead to it?"
    return TransientError(text)
