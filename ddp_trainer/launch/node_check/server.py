"""The node check on the head: it reads the reports of the other nodes and publishes the result."""

import errno
import secrets
import socket
import time
from contextlib import closing

from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.launch.network import check_port, listen
from ddp_trainer.launch.node_check import NodeInfo, messages
from ddp_trainer.launch.node_check.messages import HEAD, NODE, READ, READY, START, Board, Message

ROUND_SECONDS = 3.0
"""How long a nonce is new; a node that has answered neither of the last two was stopped."""
LINGER_SECONDS = 3.0
"""How long an elastic job waits for one more node, and how long the head waits for the others to read the result."""


def wait_for_nodes(node: NodeInfo, error: ConfigError | None) -> None:
    """Hold the port until enough nodes are ready and know it; raise why they are not. `error` is this node's own."""
    descriptor = take_port(node).detach()
    with closing(listen(node.head[0], 0)) as own_port:
        try:
            board = Board(messages.open_store(node.head, descriptor=descriptor), node.key())
            server = Server(node, board, port=own_port.getsockname()[1])
            messages.check_result(server.run(messages.encode_error(node.named(error)) if error else ""))
        except OSError:
            raise TransientError(
                "the store at {}:{} does not answer this host itself: let its firewall pass this port".format(
                    *node.head
                )
            ) from None


def take_port(node: NodeInfo) -> socket.socket:
    """Return a socket that listens at the head's address and port; raise why it cannot."""
    address, port = node.head
    try:
        if node.is_elastic:
            listen("", port).close()  # its store will listen on all addresses
        return listen(address, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"node 0 runs on the head, and {address} is not an address of this host ({node.address}): start node 0 "
                "there, or give this node its own rank"
            ) from None
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"port {port} cannot be used ({error.strerror}): choose another one") from None
    try:
        messages.open_store(node.head)
    except OSError:
        raise node.port_taken("another program") from None
    raise node.port_taken("the rendezvous of another job")


class Server:
    """The reports of the other nodes, and what follows from them."""

    def __init__(self, node: NodeInfo, board: Board, *, port: int) -> None:
        self.node, self.board, self.port = node, board, port
        self.settings = node.settings(secrets.token_hex(8))
        self.nonces = [""]
        self.reports: dict[int, Message] = {}
        self.nodes: dict[str, str] = {}
        self.old_nodes: set[str] = set()
        """Those that had come before this round."""
        self.newest_node = time.monotonic()
        self.deadline = self.newest_node + node.timeout

    def run(self, result: str) -> str:
        """Return the result, when the other nodes have read it; OSError if the store does not work any more."""
        round_end, end = 0.0, float("inf")
        while not result or (time.monotonic() < end and not self.is_read(result)):
            if time.monotonic() > round_end:
                self.nonces, self.old_nodes = [secrets.token_hex(8), self.nonces[0]], set(self.nodes)
                round_end = time.monotonic() + ROUND_SECONDS
            message = Message(
                nonce=self.nonces[0], nodes=self.nodes, address=self.node.address, port=self.port, time=time.time(),
                settings=self.settings, result=result,
            )  # fmt: skip
            self.board.publish(HEAD, message)  # again and again, because any program can delete it
            for rank in range(1, self.node.max_nodes):
                try:
                    self.read_report(rank)
                except (ConfigError, TransientError) as error:
                    result = result or messages.encode_error(error)
            result = result or self.decide()
            if result:
                end = min(end, time.monotonic() + LINGER_SECONDS)
            time.sleep(0.1)
        return result

    def read_report(self, rank: int) -> None:
        """Keep the newest report of a node, as long as it is new, and raise the error that it contains or shows."""
        report, previous = self.board.read(f"{NODE}{rank}", nonce=self.nonces[0]), self.reports.get(rank)
        if previous and previous.nonce not in self.nonces:
            del self.reports[rank]
        if report is None:
            return
        self.reports[rank] = report
        if not report.nodes.items() <= self.nodes.items():
            self.nodes |= report.nodes
            self.newest_node = time.monotonic()
            check_port(report.address, report.port, f"node {rank} ({report.address}): the head cannot reach it")
        messages.check_result(report.result)
        is_alive = previous is not None and previous.nonce == report.nonce  # it has answered this nonce too
        if previous and is_alive and len(both := {*previous.nodes, *report.nodes}) > 1 and both <= self.old_nodes:
            hosts = "twice" if previous.address == report.address else f"to {previous.address} and {report.address}"
            raise ConfigError(f"node rank {rank} was given {hosts}: number the nodes from 0, each once")

    def decide(self) -> str:
        """Return START when enough nodes are ready, an error when they are not in time, and nothing before."""
        node, now = self.node, time.monotonic()
        num_ready = 1 + sum(report.result == READY for report in self.reports.values())
        has_waited = now > min(self.deadline, self.newest_node + LINGER_SECONDS)
        if num_ready == node.max_nodes or (num_ready >= node.min_nodes and has_waited):
            return START
        if now < self.deadline:
            return ""
        missing = [rank for rank in range(1, node.max_nodes) if rank not in self.reports]
        others = [
            f"; {report.address} came as node {rank} with other settings, or is not part of this job"
            for rank in missing
            if (report := self.board.read_untrusted(f"{NODE}{rank}"))
        ]
        error = TransientError(
            f"{num_ready} of {'at least ' * node.is_elastic}{node.min_nodes} nodes came within {node.timeout:.0f} s, "
            f"missing: {', '.join(f'node {rank}' for rank in missing[:20])}{''.join(others[:2])}: start all nodes "
            f"within {node.timeout:.0f} s of each other, and see the output of these"
        )
        return messages.encode_error(error)

    def is_read(self, result: str) -> bool:
        """Return whether the other nodes have read the result; before the deadline, an error is for later nodes too."""
        is_late = time.monotonic() > self.deadline
        is_complete = result == START or is_late or len(self.reports) + 1 == self.node.max_nodes
        return is_complete and all(report.result == READ for report in self.reports.values())
