"""The node check on loopback: real processes, real ports, and programs that try to disturb it."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from processes import Finished, held_port, start_command, start_launch, wait_for
from torch.distributed import TCPStore

from ddp_trainer.commands import freeze, node_check
from ddp_trainer.launchers.network import JOB_KEY, MAX_BYTES
from ddp_trainer.launchers.node_check.messages import Message, receive
from ddp_trainer.launchers.node_check.node import RDZV_ID, SECRET, NodeInfo
from ddp_trainer.launchers.node_check.server import find_slow

SECONDS = 90
"""After which a node that has not ended fails the test."""


NODE = NodeInfo(
    node_rank=1,
    min_nodes=2,
    max_nodes=2,
    head=("127.0.0.1", 9),
    timeout=9,
    address="127.0.0.1",
    versions={"nnodes": "2"},
    config={RDZV_ID: "none", SECRET: "shared"},
    speeds={},
    name="",
    run_dir=Path(),
)
"""A node of a job without a config, with the secret "shared"."""


@pytest.fixture
def port() -> int:
    return held_port()


def node_words(
    port: int, rank: int, *options: str, nnodes: str = "2", timeout: float = 20
) -> list[str]:
    """Return the words of the command on one node."""
    keys = {"port": port, "nnodes": nnodes, "node_rank": rank, "timeout": timeout}
    words = [f"{key}={value}" for key, value in keys.items()]
    return ["node-check", "head=127.0.0.1", *words, *options]


class Node:
    """The command on one node, or a script that runs it."""

    def __init__(
        self,
        port: int,
        rank: int,
        *options: str,
        secret: str = "",
        script: Path | None = None,
        **keys: Any,
    ) -> None:
        program = [str(script)] if script else ["-m", "ddp_trainer"]
        number, name = tempfile.mkstemp()
        os.close(number)
        self.output = Path(name)
        self.process = start_launch(
            [*program, *node_words(port, rank, *options, **keys)],
            ranks=None,
            output=name,
            DDP_TRAINER_JOB_SECRET=secret,
        )

    def end(self) -> Finished:
        """Wait until the node has ended."""
        self.process.join(SECONDS)
        ended = Finished(self.process.exitcode, self.output.read_text())
        self.output.unlink()
        print(*ended)
        assert ended.code is not None
        return ended


def end_all(*nodes: Node) -> list[Finished]:
    return [node.end() for node in nodes]


def write_jobs(folder: Path, *settings: str) -> list[str]:
    """Write a job file for each of `settings` and return the options that name them."""
    for number, setting in enumerate(settings):
        freeze.main([str(folder / f"{number}.json"), f"output_dir={folder}/private", setting])
    return [f"job_file={folder}/{number}.json" for number in range(len(settings))]


def connect(port: int) -> socket.socket:
    """Connect to the head as soon as it listens."""
    end = time.monotonic() + SECONDS
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        assert time.monotonic() < end
        time.sleep(0.05)


# --- nodes that can start, and nodes that cannot --------------------------------------------------


def test_nodes_start_together_without_torch_and_the_port_is_free_again(
    port: int, without_torch: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", without_torch["PYTHONPATH"])
    processes = [
        start_command([sys.executable, "-m", "ddp_trainer", *node_words(port, rank, nnodes="3")])
        for rank in range(3)
    ]
    ended = []
    for process in processes:
        output, _ = process.communicate(timeout=SECONDS)
        ended.append(Finished(process.returncode, output))
    for rank, node in enumerate(ended):
        assert node == Finished(
            0, f"node {rank} of 3: 127.0.0.1 on lo, head 127.0.0.1:{port}\n127.0.0.1\n"
        )
    TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # as torchrun does next


def test_a_missing_node_is_named_on_all_nodes(port: int) -> None:
    head, node = end_all(*(Node(port, rank, nnodes="4", timeout=3) for rank in (0, 2)))
    missing = "2 of 4 nodes came within 3 s, missing: node 1, node 3: start all"
    assert (head.code, node.code) == (1, 1)
    assert f"error: {missing}" in head.output
    assert f"error: node 2: stopped by the head: {missing}" in node.output


def test_an_elastic_job_starts_with_its_minimum(port: int) -> None:
    assert [
        node.code for node in end_all(*(Node(port, rank, nnodes="2:4") for rank in (0, 3)))
    ] == [0, 0]


def test_a_node_that_was_killed_while_it_waited_may_come_again(port: int) -> None:
    head, first = (Node(port, rank, nnodes="3", timeout=60) for rank in (0, 1))
    connect(port).close()
    time.sleep(1)  # most often it has reported by then; nothing fails if it has not
    first.process.kill()
    first.end()
    ended = end_all(head, *(Node(port, rank, nnodes="3", timeout=60) for rank in (1, 2)))
    assert [node.code for node in ended] == [0] * 3


def test_a_head_that_was_killed_or_is_not_there_is_noticed(port: int) -> None:
    head, node = (Node(port, rank, nnodes="3", timeout=3) for rank in (0, 1))
    connect(port).close()
    head.process.kill()
    _, ended = end_all(head, node)
    assert ended.code == 1
    nothing = (
        f"nothing listened at 127.0.0.1:{port} for 3 s (a loopback address: each host reaches only"
        " itself)"
    )
    assert f"error: node 1 (127.0.0.1): {nothing}" in ended.output


def test_a_rank_that_two_nodes_have_is_named(port: int) -> None:
    ended = end_all(*(Node(port, rank, nnodes="4") for rank in (0, 1, 2, 2)))
    assert [node.code for node in ended] == [2] * 4
    assert (
        "error: node rank 2 was given twice: give each node a different rank, from 0"
        in ended[0].output
    )
    assert all(
        "stopped by the head: node rank 2 was given twice" in node.output for node in ended[1:]
    )


QUICK = """
from ddp_trainer.distributed.environment import end_with_launcher
end_with_launcher({"TORCHELASTIC_RUN_ID": ""})  # or a stopped node outlives killed tests
from ddp_trainer import __main__
from ddp_trainer.launchers import fitness
fitness.SECONDS = 1.0
__main__.main()
"""


@pytest.mark.fault("a node that is slower than the others")
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_node_is_named_on_all_nodes_and_excluded(
    slow: int, port: int, tmp_path: Path
) -> None:
    [job] = write_jobs(tmp_path, "check.fitness=true")
    script = tmp_path / "quick.py"
    script.write_text(QUICK)
    nodes = [Node(port, rank, job, timeout=60, script=script) for rank in (0, 1)]
    process = nodes[slow].process
    wait_for(lambda: nodes[slow].output.read_text().startswith("node "))  # it begins to measure
    while process.is_alive():
        for stop, seconds in ((signal.SIGSTOP, 0.25), (signal.SIGCONT, 0.05)):
            with suppress(ProcessLookupError):
                os.kill(process.pid, stop)
            time.sleep(seconds)
    ended = end_all(*nodes)
    assert [node.code for node in ended] == [1, 1]
    named = (
        rf"error: (node 1: stopped by the head: )?node {slow} reaches \d+ % of the median of the"
        r" other nodes in its "
    )
    assert all(re.search(named, node.output) for node in ended)
    assert "stopped by the head" not in ended[slow].output
    [run_dir] = (tmp_path / "private").iterdir()
    assert (run_dir / "excluded_nodes").read_text() == f"{socket.gethostname()}\n"


def test_slow_nodes_are_those_far_below_the_median_of_the_others() -> None:
    speeds = {rank: {"matrix product": 100.0 + rank, "memory bandwidth": 10.0} for rank in range(4)}
    assert find_slow(speeds) == {}
    slow = find_slow(speeds | {2: {"matrix product": 101.0, "memory bandwidth": 8.0}})
    assert slow == {
        2: "node 2 reaches 80 % of the median of the other nodes in its memory bandwidth"
    }
    slow = find_slow({0: {"x": 8.0}, 1: {"x": 10.0}})
    assert slow == {0: "node 0 reaches 80 % of the median of the other nodes in its x"}
    assert find_slow({0: {}, 1: {}}) == find_slow({0: {"x": 1.0}}) == {}


def test_the_store_of_a_running_elastic_job_is_joined_only_by_its_nodes() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set(f"{JOB_KEY}/mine", "")
    nodes = ("mine", "1:2", 0), ("mine", "1:2", 1), ("yours", "1:2", 1), ("mine", "2", 1)
    ended = end_all(
        *(Node(store.port, rank, f"rdzv_id={job}", nnodes=n, timeout=3) for job, n, rank in nodes)
    )
    assert [node.code for node in ended] == [1, 0, 1, 1]
    taken = f"port {store.port} is taken on the head 127.0.0.1 by another program or job"
    assert [taken in node.output for node in ended] == [True, False, True, True]


DIFFERENT = (
    "node 1 (127.0.0.1): other settings than on the head (optimizer.lr): use the same on all nodes"
)


def test_with_a_secret_all_nodes_learn_at_once_which_keys_differ(port: int, tmp_path: Path) -> None:
    jobs = write_jobs(tmp_path, "optimizer.lr=0.125", "optimizer.lr=0.375")
    head, node = end_all(*(Node(port, rank, job, secret="shared") for rank, job in enumerate(jobs)))
    assert (head.code, node.code) == (2, 2)
    assert f"error: {DIFFERENT}" in head.output
    assert f"error: {DIFFERENT}" in node.output
    assert "0.125" not in head.output + node.output


def test_without_a_secret_only_the_node_itself_learns_which_keys_differ(
    port: int, tmp_path: Path
) -> None:
    """To the head, a node without the key looks like any other program."""
    jobs = [*write_jobs(tmp_path, "optimizer.lr=0.125", "optimizer.lr=0.375"), "rdzv_id=none"]
    head, node, other = end_all(
        *(
            Node(port, rank, job, nnodes="3", timeout=8, secret="x" * (rank == 2))
            for rank, job in enumerate(jobs)
        )
    )
    assert (head.code, node.code, other.code) == (1, 2, 2)
    assert f"error: {DIFFERENT}" in node.output
    assert f"error: node 2 (127.0.0.1): other settings than on the head ({SECRET})" in other.output
    assert (
        "; 127.0.0.1 came as node 1 with other settings, or is not part of this job" in head.output
    )


def test_a_setting_that_only_the_head_has_is_named() -> None:
    head = replace(NODE, config=NODE.config | {"logger.wandb.name": "wandb"})
    assert str(NODE.find_difference(head.settings())).startswith(
        "other settings than on the head (logger.wandb.name): use the same"
    )


def test_another_number_of_nodes_is_named() -> None:
    head = replace(NODE, versions={"nnodes": "3"})
    assert str(NODE.find_difference(head.settings())) == (
        "nnodes is 2 here and 3 on the head: use the same on all nodes"
    )


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("node_rank=2", "node_rank=2 must be 0 to 1\n"),
        ("nnodes=4:2", "nnodes=4:2 must be N or MIN:MAX, from 1 to 65535\n"),
        ("port=0", "port=0 must be 1 to 65535\n"),
        ("timeout=0", "timeout=0.0 must be greater than 0, and less than a day\n"),
        ("port=x", "port"),
        ("seed=1", "seed=1 is not an option of node-check: --help lists them\n"),
        (
            "head=a..b",
            "head 'a..b' does not resolve on this host (unknown name): give its address, or a name",
        ),
        ("job_file=/none", "job_file=/none cannot be read (No such file or directory)"),
    ],
)
def test_a_mistake_in_the_options_is_one_error(
    option: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        node_check.main(["head=127.0.0.1", "port=9", "nnodes=2", "node_rank=1", option])
    output = capsys.readouterr().err
    assert (ended.value.code, output.count("\n")) == (2, 1)
    assert output.startswith(f"error: {error}")


# --- another program at the port ------------------------------------------------------------------


@contextmanager
def server(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Listen, and call `answer` with each connection in a thread of its own."""

    def respond(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            answer(connection)

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=respond, args=listener.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def send_garbage(connection: socket.socket) -> None:
    while True:
        connection.sendall(os.urandom(2**16))


def test_another_program_at_the_port_is_named_in_time() -> None:
    programs: list[Callable[[socket.socket], object]] = [
        lambda connection: connection.sendall(b"SSH-2.0-\x1b[31mhere\r\n"),
        lambda connection: connection.recv(1),  # nothing comes: a node does not speak first
        lambda connection: connection.sendall(
            VALID.encode(b"other key").replace(b"called", b"\x1b[31m")
        ),
        send_garbage,
    ]
    with ExitStack() as stack:
        ports = [stack.enter_context(server(program)) for program in programs]
        nodes = [(Node(port, 0, timeout=2), Node(port, 1, timeout=2)) for port in ports]
        ended = [end_all(*pair) for pair in nodes]
    for port, (head, node) in zip(ports, ended, strict=True):
        taken = f"port {port} is taken on the head 127.0.0.1 by another program or job"
        assert (head.code, node.code) == (1, 1)
        assert f"error: {taken} (ss -ltnp" in head.output
        assert f"error: node 1 (127.0.0.1): {taken}" in node.output
        assert is_plain(head.output + node.output)


# --- messages that no node of the job has sent ----------------------------------------------------

VALID = Message(
    rank=1,
    address="10.0.0.9",
    port=9,
    nonce="n",
    time=1.0,
    settings={"a": "b"},
    error="2 called off",
)
INVALID = {
    "nothing": b"",
    "no JSON": b"\xff\x00{\n",
    "no message": b"[1]\n",
    "nested": b"[" * 50_000 + b"\n",
    "a field missing": b'{"rank": 1}\n',
    "too long": (
        json.dumps(
            asdict(VALID) | {"settings": {str(n): "1" for n in range(MAX_BYTES // 8)}}
        ).encode()
        + b"\n"
    ),
    **{
        f"{key} {str(value)[:20]!r}": json.dumps(asdict(VALID) | {key: value}).encode() + b"\n"
        for key, value in [
            ("nonce", "\x1b[2J"),
            ("nonce", 7),
            ("settings", []),
            ("settings", {"a": 1}),
            ("settings", {"a": {}}),
            ("settings", {"\n": ""}),
            ("address", "a" * 501),
            ("address", "host"),
            ("address", "::1%\u202e"),
            ("port", -1),
            ("port", 2**16),
            ("port", True),
            ("port", 1.5),
            ("time", float("nan")),
            ("time", float("inf")),
            ("time", 10**400),
            ("time", "now"),
            ("error", None),
            ("error", "1 \x9b31m"),
        ]
    },
}


def read(line: bytes, key: bytes = b"key", nonce: str = "nonce") -> tuple[Message, bool]:
    async def read_stream() -> tuple[Message, bool]:
        reader = asyncio.StreamReader(limit=MAX_BYTES)
        reader.feed_data(line)
        reader.feed_eof()
        return await receive(reader, key, nonce, 1)

    return asyncio.run(read_stream())


@pytest.mark.parametrize("body", INVALID.values(), ids=INVALID)
def test_an_invalid_message_counts_as_none(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # of json, asyncio and ipaddress
        read(b"0" * 64 + body)


def test_a_message_counts_only_with_its_key_and_as_an_answer_to_its_nonce() -> None:
    line = VALID.encode(b"key", "nonce")
    assert read(line) == (VALID, True)
    for other in (
        read(line, key=b"other"),
        read(line, nonce="other"),
        read(line.replace(b"10.0.0.9", b"10.0.0.8")),
    ):
        assert not other[1]


def is_plain(text: str) -> bool:
    return text.replace("\n", "").isprintable()


def test_recorded_messages_of_a_head_do_not_start_a_node(port: int) -> None:
    """Messages of the head of an earlier start have a valid signature, and are ignored all the
    same.
    """
    recorded = []

    def replay(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", port)) as head:
            # its challenge, which the node believes
            connection.sendall(head.makefile("rb").readline())
        recorded.append(connection.makefile("rb").readline())
        connection.sendall(replace(VALID, error="").encode(NODE.key(), "an earlier nonce"))

    head = Node(port, 0, timeout=4, secret="shared")
    connect(port).close()
    with server(replay) as replay_port:
        node = Node(replay_port, 1, timeout=1, secret="shared").end()
    assert (len(recorded) > 0, node.code, head.end().code) == (True, 1, 1)
    assert (
        "error: node 1 (127.0.0.1): node 0, the head at 127.0.0.1, has ended or does not answer"
        in node.output
    )


def test_a_stranger_takes_no_nodes_place_and_reads_no_config(port: int, tmp_path: Path) -> None:
    head = Node(port, 0, write_jobs(tmp_path, "name=confidential")[0], timeout=3)
    with connect(port) as connection:
        line = connection.makefile("rb").readline()
        connection.sendall(VALID.encode(b"key", "nonce"))
        assert connection.recv(1) == b""
    assert "output_dir" in read(line)[0].settings
    assert not any(value in line for value in (b"private", b"confidential", b"lenet"))
    ended = head.end()
    assert ended.code == 1
    came = "127.0.0.1 came as node 1 with other settings, or is not part of this job"
    assert f"error: 1 of 2 nodes came within 3 s, missing: node 1; {came}: start" in ended.output
    assert is_plain(ended.output)


def test_strangers_do_not_keep_the_nodes_from_starting(port: int) -> None:
    """One holds 400 connections open, others send garbage, forged reports, and reports of an
    earlier start.
    """
    head = Node(port, 0, timeout=60, secret="shared")
    idle = [connect(port) for _ in range(400)]
    closed = threading.Event()

    def disturb(line: bytes) -> None:
        while not closed.wait(0.01):
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=1) as connection,
            ):
                connection.sendall(line)

    lines = [
        VALID.encode(b"other"),
        VALID.encode(NODE.key(), "earlier"),
        os.urandom(2**18),
        b"GET / HTTP/1.0\r\n\r\n",
    ]
    threads = [threading.Thread(target=disturb, args=(line,)) for line in lines]
    for thread in threads:
        thread.start()
    ended = end_all(head, Node(port, 1, timeout=60, secret="shared"))
    closed.set()
    for thing in (*threads, *idle):
        thing.join() if isinstance(thing, threading.Thread) else thing.close()
    assert [node.code for node in ended] == [0, 0]
    assert all(node.output.count("\n") == 2 and is_plain(node.output) for node in ended)


def test_speeds_that_only_some_nodes_have_are_not_compared() -> None:
    assert find_slow({0: {"cores": 1.0, "GPU": 9.0}, 1: {"cores": 1.0}}) == {}
    assert find_slow({0: {"cores": 0.0}, 1: {"cores": 0.0}}).keys() == {0, 1}
    assert find_slow({0: {}, 1: {"cores": 1.0}}) == {}
    assert find_slow({0: {"cores": 1.0}}) == {}
