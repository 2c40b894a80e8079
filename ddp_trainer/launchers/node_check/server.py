"""The node check on the head, which collects the nodes' reports and sends each node the result."""

import asyncio
import errno
import secrets
import socket
import time
from asyncio import StreamReader, StreamWriter
from dataclasses import replace
from statistics import median

from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.files import exclude_node
from ddp_trainer.launchers.network import MAX_BYTES, check_port, connect, listen
from ddp_trainer.launchers.node_check.messages import (
    Message,
    StartError,
    decode_error,
    encode_error,
    receive,
)
from ddp_trainer.launchers.node_check.node import NodeInfo

REPORT_SECONDS = 10.0
"""Seconds in which a connected node must report; it may test a connection to the head for 4 s."""
LINGER_SECONDS = 2.0
"""Seconds that an elastic job waits for one more node, and that the head waits until the nodes have
read the result.
"""
MAX_UNKNOWN = 256
"""Maximum number of connections without a signed report; one more closes the oldest."""
SLOW = 0.85
"""A node is slow if it reaches less than this share of the median of the other nodes."""


async def wait_for_nodes(node: NodeInfo, error: ConfigError | None) -> None:
    """Return when enough nodes are ready; else raise the reason. error: an error of this node."""
    with take_port(node) as listener, listen(node.address, 0) as own_port:
        server = Server(node, port=own_port.getsockname()[1])
        if error:
            server.set_result(node.named(error))
        if result := await server.run(listener):
            raise result


def take_port(node: NodeInfo) -> socket.socket:
    """Return a socket that listens at the head's port; PortTakenError, ConfigError if it cannot."""
    address, port = node.head
    try:
        if node.min_nodes < node.max_nodes:  # torchrun's store will listen on all addresses then
            listen("", port).close()
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
            f"port {port} cannot be used ({error.strerror}): choose another port"
        ) from None


class Server:
    """Collects the reports of the nodes, decides whether they can start, and sends the result."""

    def __init__(self, node: NodeInfo, *, port: int) -> None:
        self.node = node
        self.key = node.key()
        self.message = Message(
            rank=0, address=node.address, port=port, settings=node.settings(secrets.token_hex(8))
        )
        self.result: asyncio.Future[StartError | None] = asyncio.Future()
        self.unknown: list[StreamWriter] = []
        """Connections without a signed report, the oldest first."""
        self.reports: dict[StreamWriter, Message] = {}
        self.strangers: dict[int, str] = {}
        """Addresses that have sent an unsigned report, by the node rank in the report."""
        self.newest_node = time.monotonic()
        self.deadline = self.newest_node + node.timeout

    async def run(self, listener: socket.socket) -> StartError | None:
        """Serve the nodes until they have the result, `LINGER_SECONDS` at most; return it."""
        # because asyncio prints errors that other programs cause, such as EMFILE
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        server = await asyncio.start_server(self.serve, sock=listener, limit=MAX_BYTES, backlog=128)
        address, port = self.node.head
        try:
            (await connect(address, port))[1].close()
        except OSError:
            raise TransientError(
                f"this host cannot reach its own {address}:{port}: open the port in its firewall"
            ) from None
        while not self.result.done():
            self.decide()
            await asyncio.sleep(0.05)
        error = self.result.result()
        if error is None:  # else nodes that connect later must receive the error too
            server.close()
        end = time.monotonic() + LINGER_SECONDS
        while time.monotonic() < end and (self.reports or error):
            await asyncio.sleep(0.05)
        server.close()
        return error

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Send a challenge to a client, and the result if it answers with a signed report."""
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
        """Check a node's report, and send it the result; OSError if the node has ended."""
        try:
            await self.check(report)
        except (ConfigError, TransientError) as error:
            self.set_result(error)
        self.reports[writer] = report
        self.newest_node = time.monotonic()
        closed = asyncio.create_task(reader.read(1))
        await asyncio.wait((closed, self.result), return_when=asyncio.FIRST_COMPLETED)
        if self.result.done():
            result = replace(self.message, error=encode_error(self.result.result()))
            writer.write(result.encode(self.key, report.nonce))
        await closed

    async def check(self, report: Message) -> None:
        """Raise the error that a node has reported, or that the head finds in its report."""
        rank = report.rank
        address = report.address
        if error := decode_error(report.error):
            raise error
        await check_port(address, report.port, f"node {rank} ({address}): the head cannot reach it")
        for other in self.reports.values():
            if other.rank == rank:
                same_host = other.address == address
                hosts = "twice" if same_host else f"to {other.address} and {address}"
                raise ConfigError(
                    f"node rank {rank} was given {hosts}: give each node a different rank, from 0"
                )

    def decide(self) -> None:
        """Set the result if enough nodes are ready, or if the time is over with too few."""
        node = self.node
        now = time.monotonic()
        num_ready = 1 + len(self.reports)
        is_complete = num_ready >= node.min_nodes and now > self.newest_node + LINGER_SECONDS
        if num_ready == node.max_nodes or is_complete:
            self.set_result(self.find_slow_nodes())
        elif num_ready < node.min_nodes and now > self.deadline:
            self.set_result(self.missing_nodes(num_ready))

    def missing_nodes(self, num_ready: int) -> TransientError:
        """Return the error that names the nodes that have not come in time."""
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
        """Return an error if nodes are slow; SLURM excludes them when it requeues the job."""
        nodes = {0: self.node} | {report.rank: report for report in self.reports.values()}
        slow = find_slow({rank: node.speeds for rank, node in nodes.items()})
        if not slow:
            return None
        for rank in slow:
            exclude_node(self.node.run_dir, nodes[rank].name)
        causes = [f"{text} ({nodes[rank].address})" for rank, text in slow.items()]
        fix = "start the job without slow nodes, or set check.fitness=false"
        return TransientError(f"{'; '.join(causes[:4])}: {fix}")

    def set_result(self, error: StartError | None) -> None:
        """Set the result, unless it is already set."""
        if not self.result.done():
            self.result.set_result(error)


def find_slow(speeds: dict[int, dict[str, float]]) -> dict[int, str]:
    """Return, by rank, which speed of a slow node is furthest below the median of the others."""
    slow = {}
    for rank, own in speeds.items():
        others = [other for key, other in speeds.items() if key != rank]
        if not own or not others:
            continue
        shares = {name: own[name] / median(other[name] for other in others) for name in own}
        name = min(shares, key=shares.__getitem__)
        if shares[name] < SLOW:
            slow[rank] = (
                f"node {rank} reaches {100 * shares[name]:.0f} % of the median of the other nodes"
                f" in its {name}"
            )
    return slow
