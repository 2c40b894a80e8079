"""The node check on the head: it collects the reports of the other nodes and answers them with the
result.
"""

import asyncio
import errno
import secrets
import socket
import time
from asyncio import StreamReader, StreamWriter
from dataclasses import replace

from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.files import exclude_node
from ddp_trainer.launchers.network import MAX_BYTES, check_port, connect, listen
from ddp_trainer.launchers.node_check import (
    Message,
    NodeInfo,
    encode_error,
    find_slow,
    raise_error,
    receive,
)

REPORT_SECONDS = 10.0
"""Seconds in which a connected node must report. It first tests a connection to the head, for up to
4 s.
"""
LINGER_SECONDS = 2.0
"""Seconds that an elastic job waits for one more node, and that the head waits until the nodes have
read the result.
"""
MAX_UNKNOWN = 256
"""Maximum number of connections without a signed report; if one more is opened, the oldest is
closed.
"""


async def wait_for_nodes(node: NodeInfo, error: ConfigError | None) -> None:
    """Return when enough nodes are ready; else raise the reason. error: what is wrong on this node;
    None: nothing.
    """
    with take_port(node) as listener, listen(node.address, 0) as own_port:
        server = Server(node, port=own_port.getsockname()[1])
        if error:
            server.set_result(encode_error(node.named(error)))
        raise_error(await server.run(listener))


def take_port(node: NodeInfo) -> socket.socket:
    """Return a socket that listens at node 0's address and port; PortTakenError if taken,
    ConfigError if not usable.
    """
    address, port = node.head
    try:
        if node.min_nodes < node.max_nodes:
            listen(
                "", port
            ).close()  # torchrun's store of an elastic job will listen on all addresses
        return listen(address, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"this host was started as node 0, the head, but {address} is not an address of"
                f" this host ({node.address}): give this host another node rank, or correct the"
                " address of the head"
            ) from None
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} cannot be used ({error.strerror}): choose another port"
            ) from None
    raise node.port_taken()


class Server:
    """Collects the reports of the other nodes, decides whether the job can start, and sends each
    node this result.
    """

    def __init__(self, node: NodeInfo, *, port: int) -> None:
        self.node = node
        self.key = node.key()
        self.message = Message(
            rank=0, address=node.address, port=port, settings=node.settings(secrets.token_hex(8))
        )
        self.result: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.unknown: list[StreamWriter] = []
        """Connections without a signed report, the oldest first."""
        self.reports: dict[StreamWriter, Message] = {}
        self.strangers: dict[int, str] = {}
        """Addresses that have sent a report without a valid signature, by the node rank in the
        report.
        """
        self.newest_node = time.monotonic()
        self.deadline = self.newest_node + node.timeout

    async def run(self, listener: socket.socket) -> str:
        """Serve the nodes; return the result, an encoded error or "", when they have it or after
        `LINGER_SECONDS`.
        """
        # because asyncio would print errors that other programs cause, for example if no file
        # descriptor is left
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        server = await asyncio.start_server(self.serve, sock=listener, limit=MAX_BYTES, backlog=128)
        try:
            (await connect(*self.node.head))[1].close()
        except OSError:
            raise TransientError(
                "this host cannot reach its own {}:{}: open the port in its firewall".format(
                    *self.node.head
                )
            ) from None
        while not self.result.done():
            self.decide()
            await asyncio.sleep(0.05)
        end = time.monotonic() + LINGER_SECONDS
        if self.result.result():  # nodes that connect later must receive the error too
            await asyncio.sleep(min(end, self.deadline) - time.monotonic())
        server.close()
        while self.reports and time.monotonic() < end:
            await asyncio.sleep(0.05)
        return self.result.result()

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Exchange messages with a client until it closes the connection; a client without the key
        gets no result.
        """
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
        """Check a node's report, wait for the result and send it to the node; OSError if the node
        has ended.
        """
        rank = report.rank
        address = report.address
        try:
            raise_error(report.error)
            await check_port(
                address, report.port, f"node {rank} ({address}): the head cannot reach it"
            )
            if same := [other.address for other in self.reports.values() if other.rank == rank]:
                hosts = "twice" if same == [address] else f"to {same[0]} and {address}"
                raise ConfigError(
                    f"node rank {rank} was given {hosts}: give each node a different rank, from 0"
                )
        except (ConfigError, TransientError) as error:
            self.set_result(encode_error(error))
        self.reports[writer] = report
        self.newest_node = time.monotonic()
        closed = asyncio.create_task(reader.read(1))
        await asyncio.wait((closed, self.result), return_when=asyncio.FIRST_COMPLETED)
        if self.result.done():
            writer.write(
                replace(self.message, error=self.result.result()).encode(self.key, report.nonce)
            )
        await closed

    def decide(self) -> None:
        """Set the result if enough nodes are ready, or an error if the time is over with too few;
        else do nothing.
        """
        node = self.node
        now = time.monotonic()
        num_ready = 1 + len(self.reports)
        if num_ready == node.max_nodes or (
            num_ready >= node.min_nodes and now > self.newest_node + LINGER_SECONDS
        ):
            self.set_result(self.slow_nodes())
        elif num_ready < node.min_nodes and now > self.deadline:
            missing = {*range(1, node.max_nodes)} - {
                report.rank for report in self.reports.values()
            }
            others = (
                f"; {self.strangers[rank]} came as node {rank} with other settings, or is not part"
                " of this job"
                for rank in sorted(self.strangers.keys() & missing)[:2]
            )
            names = ", ".join(f"node {rank}" for rank in sorted(missing)[:20])
            least = "at least " * (node.min_nodes < node.max_nodes)
            error = TransientError(
                f"{num_ready} of {least}{node.min_nodes} nodes came within {node.timeout:.0f} s,"
                f" missing: {names}{''.join(others)}: start all nodes within {node.timeout:.0f} s"
                " of each other, and see the output of the missing nodes"
            )
            self.set_result(encode_error(error))

    def slow_nodes(self) -> str:
        """Return an encoded error with the slow nodes, "" if none; SLURM will exclude them when it
        requeues the job.
        """
        nodes = {0: self.node} | {report.rank: report for report in self.reports.values()}
        slow = find_slow({rank: node.speeds for rank, node in nodes.items()})
        if not slow:
            return ""
        for rank in slow:
            exclude_node(self.node.run_dir, nodes[rank].name)
        text = "; ".join(list(slow.values())[:4])
        where = ", ".join(f"node {rank} is {nodes[rank].address}" for rank in list(slow)[:4])
        fix = "start the job without slow nodes, or set check.fitness=false"
        return encode_error(TransientError(f"{text} ({where}): {fix}"))

    def set_result(self, result: str) -> None:
        """Set the result, unless it is already set."""
        if not self.result.done():
            self.result.set_result(result)
