"""The node check on the head, which collects the nodes' reports and sends each node the result."""

import asyncio
import errno
import secrets
import socket
import time
from asyncio import StreamReader, StreamWriter
from dataclasses import replace
from statistics import median

from ddp_trainer.checkpoint.run_dir import exclude_node
from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.launchers.network import MAX_BYTES, find_port_error, listen
from ddp_trainer.launchers.node_check.messages import (
    Message,
    StartError,
    decode_error,
    encode_error,
    receive,
)
from ddp_trainer.launchers.node_check.node import NodeInfo

REPORT_SECONDS = 10.0
"""Time limit for the report of a connected node, which may first test a connection for 4 s."""
LINGER_SECONDS = 2.0
"""Seconds for which an elastic job with enough nodes waits for one more node. The head also waits
at most this long until all nodes have read the result.
"""
MAX_UNKNOWN = 256
"""Maximum number of connections without a signed report; beyond it, the oldest is closed."""
SLOW = 0.85
"""A node is slow if one of its speeds is below this share of the median of the other nodes."""


async def wait_for_nodes(node: NodeInfo, error: ConfigError | None) -> None:
    """Wait until enough nodes have reported, and send them the result.

    error: an error that was found on the head.

    Raises:
        ConfigError, TransientError: the reason why the nodes cannot start.
    """
    with take_port(node) as listener, listen(node.address, 0) as own_port:
        server = Server(node, port=own_port.getsockname()[1])
        if error:
            server.result.set_result(node.named(error))
        if result := await server.run(listener):
            raise result


def take_port(node: NodeInfo) -> socket.socket:
    """Return a socket that listens on the head's port; PortTakenError, ConfigError if it cannot."""
    address, port = node.head
    try:
        return listen(address, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise node.port_taken() from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"this host was started as node 0, the head, but {address} is not an address of"
                f" this host ({node.address}): give this host another node rank, or correct the"
                " address of the head"
            ) from None
        raise ConfigError(
            f"port {port} of the head {address} cannot be used ({error.strerror}): choose another"
            " port on all nodes"
        ) from None


class Server:
    """Collects the reports of the nodes, decides whether they can start, and sends the result."""

    def __init__(self, node: NodeInfo, *, port: int) -> None:
        self.node = node
        self.key = node.key()
        self.message = Message(rank=0, address=node.address, port=port, settings=node.settings())
        self.result: asyncio.Future[StartError | None] = asyncio.Future()
        self.unknown: list[StreamWriter] = []
        """Connections without a signed report, the oldest first."""
        self.reports: dict[StreamWriter, Message] = {}
        self.strangers: dict[int, str] = {}
        """Addresses that have sent a report without a valid signature, by the node rank in it."""
        self.newest_node = time.monotonic()
        self.deadline = self.newest_node + node.timeout

    async def run(self, listener: socket.socket) -> StartError | None:
        """Serve the nodes until there is a result; return its error, or None.

        After that, wait up to `LINGER_SECONDS` until the nodes have read the result.
        """
        # because asyncio would print errors that other programs cause, such as EMFILE
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        server = await asyncio.start_server(self.serve, sock=listener, limit=MAX_BYTES, backlog=128)
        if closed := await find_port_error(*self.node.head, "this host cannot reach itself"):
            return closed
        while not self.result.done():
            self.decide()
            await asyncio.sleep(0.05)
        error = self.result.result()
        if error is None:  # an error must also reach nodes that connect later
            server.close()
        end = time.monotonic() + LINGER_SECONDS
        while time.monotonic() < end and (self.reports or error):
            await asyncio.sleep(0.05)
        server.close()
        return error

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Send a challenge to a client; if it answers with a signed report, send it the result."""
        self.unknown = [*(other for other in self.unknown if not other.is_closing()), writer]
        if len(self.unknown) > MAX_UNKNOWN:
            self.unknown[0].transport.abort()
        challenge = replace(self.message, nonce=secrets.token_hex(16), time=time.time())
        try:
            writer.write(challenge.encode(self.key))
            report, is_signed = await receive(reader, self.key, challenge.nonce, REPORT_SECONDS)
            if is_signed:
                self.unknown.remove(writer)
                await self.answer(report, reader, writer)
            else:
                self.strangers[report.rank] = writer.get_extra_info("peername")[0]
        except (OSError, ValueError):  # another program, or the node has ended
            pass
        finally:
            self.reports.pop(writer, None)
            writer.close()

    async def answer(self, report: Message, reader: StreamReader, writer: StreamWriter) -> None:
        """Check a report, wait for the result, and send it; OSError if the node has ended."""
        error = await self.find_error(report)
        if error and not self.result.done():
            self.result.set_result(error)
        self.reports[writer] = report
        self.newest_node = time.monotonic()
        closed = asyncio.create_task(reader.read(1))
        await asyncio.wait((closed, self.result), return_when=asyncio.FIRST_COMPLETED)
        if self.result.done():
            result = replace(self.message, error=encode_error(self.result.result()))
            writer.write(result.encode(self.key, report.nonce))
        await closed

    async def find_error(self, report: Message) -> StartError | None:
        """Return a reported error, a connection error or the error of a repeated rank; or None."""
        rank = report.rank
        address = report.address
        failure = f"node {rank} ({address}): the head cannot reach it"
        if error := decode_error(report.error) or await find_port_error(
            address, report.port, failure
        ):
            return error
        for other in self.reports.values():
            if other.rank == rank:
                same_host = other.address == address
                hosts = "twice" if same_host else f"to {other.address} and {address}"
                return ConfigError(
                    f"node rank {rank} was given {hosts}: give each node a different rank, from 0"
                )
        return None

    def decide(self) -> None:
        """Set the result if enough nodes are ready, or if the deadline has passed with too few."""
        node = self.node
        now = time.monotonic()
        num_ready = 1 + len(self.reports)
        is_complete = num_ready >= node.min_nodes and now > self.newest_node + LINGER_SECONDS
        if num_ready == node.max_nodes or is_complete:
            self.result.set_result(self.find_slow_nodes())
        elif num_ready < node.min_nodes and now > self.deadline:
            self.result.set_result(self.missing_nodes(num_ready))

    def missing_nodes(self, num_ready: int) -> TransientError:
        """Return the error that names the nodes that have not reported in time."""
        node = self.node
        ranks = {report.rank for report in self.reports.values()}
        missing = [rank for rank in range(1, node.max_nodes) if rank not in ranks]
        names = ", ".join(f"node {rank}" for rank in missing[:20])
        strangers = [
            f"; {self.strangers[rank]} came as node {rank} with other settings, or is not part of"
            " this job"
            for rank in missing
            if rank in self.strangers
        ]
        return TransientError(
            f"{num_ready} of {node.versions['nnodes']} nodes came within {node.timeout:.0f} s,"
            f" missing: {names}{''.join(strangers[:2])}: start all nodes at the same time, and see"
            " the output of the missing nodes"
        )

    def find_slow_nodes(self) -> TransientError | None:
        """Return an error if nodes are slow, else None; list them in the file excluded_nodes.

        launch/slurm.sbatch reads the file and excludes these nodes when it requeues the job.
        """
        nodes = {0: self.node} | {report.rank: report for report in self.reports.values()}
        causes = []
        for rank, text in find_slow({key: node.speeds for key, node in nodes.items()}).items():
            exclude_node(self.node.run_dir, nodes[rank].name)
            causes.append(f"{text} ({nodes[rank].address})")
        fix = "start the job without slow nodes, or set check.fitness=false"
        return TransientError(f"{'; '.join(causes[:4])}: {fix}") if causes else None


def find_slow(speeds: dict[int, dict[str, float]]) -> dict[int, str]:
    """Return a text for each slow node, by rank, about its lowest speed relative to the others."""
    slow = {}
    # A node without a GPU has fewer speeds than a node with one.
    common = set.intersection(*(set(own) for own in speeds.values()))
    for rank, own in speeds.items():
        others = [other for key, other in speeds.items() if key != rank]
        names = {
            own[name] / max(median(other[name] for other in others), 1e-9): name
            for name in sorted(common)
            if others
        }
        share = min(names, default=1.0)
        if share < SLOW:
            slow[rank] = (
                f"node {rank} reaches {100 * share:.0f} % of the median of the other nodes in its"
                f" {names[share]}"
            )
    return slow
