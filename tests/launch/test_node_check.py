"""The node check on loopback: real processes, real ports, real stores, and programs that try to disturb it."""

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from conftest import Finished, clean_environment, forkserver
from torch.distributed import DistError, TCPStore

from ddp_trainer.commands import freeze, node_check
from ddp_trainer.launch.node_check import SECRET
from ddp_trainer.launch.node_check.messages import HEAD, MAX_BYTES, NODE, Board, Message

SECONDS = 90
"""After which a node that has not ended fails the test."""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Node:
    """The node check of a node: in a process that is forked from one that has imported torch, or in a `new` one."""

    def __init__(self, port: int, rank: int, *options: str, nnodes: str = "2", timeout: float = 20, secret: str = "",
                 new: bool = False) -> None:  # fmt: skip
        words = ["head=127.0.0.1", f"port={port}", f"nnodes={nnodes}", f"node_rank={rank}", f"timeout={timeout}"]
        words += options
        handle, self.log = tempfile.mkstemp()
        os.close(handle)
        self.command = None
        if new:
            command = [sys.executable, "-m", "ddp_trainer", "node-check", *words]
            with open(self.log, "w") as log:
                self.command = subprocess.Popen(command, env=clean_environment(), stdout=log, stderr=log)
        else:
            self.process = forkserver().Process(target=check_node, args=(words, self.log, secret))
            self.process.start()

    def end(self) -> Finished:
        """Wait until the node has ended."""
        if self.command:
            code = self.command.wait(SECONDS)
        else:
            self.process.join(SECONDS)
            code = self.process.exitcode
        output = Path(self.log).read_text()
        os.unlink(self.log)
        print(code, output)
        assert code is not None, f"still running after {SECONDS} s"
        return Finished(code, output)


def check_node(words: list[str], log: str, secret: str) -> None:
    """Run the command in this process."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ[SECRET] = secret
    node_check.main(words)


def end_all(*nodes: Node) -> list[Finished]:
    return [node.end() for node in nodes]


def write_jobs(folder: Path, *settings: str) -> list[str]:
    """Write a job file for each of `settings` and return the options that name them."""
    for number, setting in enumerate(settings):
        freeze.main([str(folder / f"{number}.json"), f"output_dir={folder}/private", setting])
    return [f"job_file={folder}/{number}.json" for number in range(len(settings))]


def wait_for_listener(port: int) -> None:
    end = time.monotonic() + SECONDS
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < end
        time.sleep(0.05)


# --- nodes that can start, and nodes that cannot --------------------------------------------------


def test_nodes_start_together_and_the_port_is_free_again(port: int) -> None:
    ended = end_all(*(Node(port, rank, nnodes="3", new=True) for rank in range(3)))
    assert [node.code for node in ended] == [0, 0, 0]
    for rank, node in enumerate(ended):
        assert node.output == f"node {rank} of 3: 127.0.0.1 on lo, head 127.0.0.1:{port}\n127.0.0.1\n"
    TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # as torchrun does next


def test_a_missing_node_is_named_on_all_nodes(port: int) -> None:
    head, node = end_all(*(Node(port, rank, nnodes="4", timeout=5) for rank in (0, 2)))
    missing = "2 of 4 nodes came within 5 s, missing: node 1, node 3: start all"
    assert (head.code, node.code) == (1, 1)
    assert f"error: {missing}" in head.output
    assert f"error: node 2: stopped by the head: {missing}" in node.output


def test_an_elastic_job_starts_with_its_minimum(port: int) -> None:
    head, node = end_all(*(Node(port, rank, nnodes="2:4") for rank in (0, 3)))
    assert (head.code, node.code) == (0, 0)


def test_a_node_that_was_stopped_while_it_waited_may_come_again(port: int) -> None:
    head, first = (Node(port, rank, nnodes="3", timeout=60) for rank in (0, 1))
    store = connect(port)
    until(lambda: published(store, HEAD, key="nodes"))
    first.process.kill()
    first.end()
    ended = end_all(head, *(Node(port, rank, nnodes="3", timeout=60) for rank in (1, 2)))
    assert [node.code for node in ended] == [0, 0, 0]


def test_a_rank_that_two_nodes_have_is_named(port: int) -> None:
    ended = end_all(*(Node(port, rank, nnodes="4") for rank in (0, 1, 2, 2)))
    assert [node.code for node in ended] == [2] * 4
    assert "error: node rank 2 was given twice: number the nodes from 0, each once" in ended[0].output
    assert all("stopped by the head: node rank 2 was given twice" in node.output for node in ended[1:])


@pytest.mark.parametrize(("rdzv_id", "code"), [("mine", 0), ("yours", 1)])
def test_the_store_of_a_running_elastic_job_is_joined_only_by_its_nodes(rdzv_id: str, code: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("torch.rendezvous.mine", "state")
    head, node = end_all(*(Node(store.port, rank, f"rdzv_id={rdzv_id}", nnodes="1:2", timeout=3) for rank in (0, 1)))
    taken = f"port {store.port} is taken on the head 127.0.0.1 by the rendezvous of another job"
    assert head.code == 1
    assert f"error: {taken}" in head.output
    assert node.code == code
    assert (taken in node.output) == (code == 1)


DIFFERENT = "node 1 (127.0.0.1): other settings than on the head (optimizer.lr): use the same on all nodes"


def test_with_a_secret_all_nodes_learn_at_once_which_keys_differ(port: int, tmp_path: Path) -> None:
    jobs = write_jobs(tmp_path, "optimizer.lr=0.125", "optimizer.lr=0.375")
    head, node = end_all(*(Node(port, rank, job, secret="shared") for rank, job in enumerate(jobs)))
    assert (head.code, node.code) == (2, 2)
    assert f"error: {DIFFERENT}" in head.output
    assert f"error: {DIFFERENT}" in node.output
    assert "0.125" not in head.output + node.output


def test_without_a_secret_only_the_node_itself_learns_which_keys_differ(port: int, tmp_path: Path) -> None:
    """To the head, a node without the key looks like any other program."""
    jobs = [*write_jobs(tmp_path, "optimizer.lr=0.125", "optimizer.lr=0.375"), "rdzv_id=none"]
    head, *nodes = (
        Node(port, rank, job, nnodes="3", timeout=12, secret="x" * (rank == 2)) for rank, job in enumerate(jobs)
    )
    head, node, other = end_all(head, *nodes)
    assert (head.code, node.code, other.code) == (1, 2, 2)
    assert f"error: {DIFFERENT}" in node.output
    assert f"error: node 2 (127.0.0.1): other settings than on the head ({SECRET})" in other.output
    assert "; 127.0.0.1 came as node 1 with other settings, or is not part of this job" in head.output


def test_another_number_of_nodes_is_named(port: int) -> None:
    head, node = end_all(Node(port, 0, nnodes="3"), Node(port, 1, nnodes="2"))
    assert (head.code, node.code) == (2, 2)
    assert "error: node 1 (127.0.0.1): nnodes is 2 here and 3 on the head: use the same on all nodes" in head.output


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["node_rank=2"], "error: node_rank=2 must be 0 to 1\n"),
        (["nnodes=4:2"], "error: nnodes=4:2 must be N or MIN:MAX, whole numbers from 1\n"),
        (["port=0"], "error: port=0 must be 1 to 65535\n"),
        (["timeout=nan"], "error: timeout=nan must be greater than 0, and less than a day\n"),
        (["port=x"], "error: port"),
        (["seed=1"], "error: seed=1 is not an option of node-check: --help lists them\n"),
        (["head=a..b"], "error: head 'a..b' does not resolve on this host (unknown name): give its address, or a name"),
        (["job_file=/none"], "error: job_file=/none cannot be read (No such file or directory)"),
    ],
)
def test_a_mistake_in_the_options_is_one_error(options: list[str], error: str, port: int) -> None:
    [node] = end_all(Node(port, 1, *options))
    assert (node.code, node.output.count("\n")) == (2, 1)
    assert node.output.startswith(error)


def test_a_head_that_is_not_there_is_waited_for(port: int) -> None:
    [node] = end_all(Node(port, 1, timeout=1))
    assert node.code == 1
    assert f"nothing listened at 127.0.0.1:{port} for 1 s, and that is each host's own address" in node.output


# --- another program at the port ------------------------------------------------------------------


def send_greeting(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-\x1b[31mhere\r\n")


def send_nothing(connection: socket.socket) -> None:
    connection.recv(1)
    time.sleep(SECONDS)


def send_garbage(connection: socket.socket) -> None:
    while True:
        connection.sendall(os.urandom(2**16))


def announce_a_huge_value(connection: socket.socket) -> None:
    """Answer as a TCPStore does to the first query, and then announce a value of 20 GB."""
    query = connection.recv(10, socket.MSG_WAITALL)  # validate, magic; ping, nonce
    connection.sendall(query[-4:])
    connection.recv(100)
    connection.sendall(b"\0" + b"\0" + struct.pack("<Q", 20 * 2**30) + bytes(1000))
    time.sleep(SECONDS)


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
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


@pytest.mark.parametrize("answer", [send_greeting, send_nothing, send_garbage])
def test_another_program_at_the_port_is_named_in_time(answer: Callable[[socket.socket], None]) -> None:
    with server(answer) as port:
        head, node = end_all(*(Node(port, rank, timeout=2, new=True) for rank in (0, 1)))
    assert (head.code, node.code) == (1, 1)
    taken = f"port {port} is taken on the head 127.0.0.1 by another program"
    assert f"error: {taken} (ss -ltnp" in head.output
    assert f"error: node 1 (127.0.0.1): {taken}" in node.output
    assert is_plain(head.output + node.output)


def test_a_value_of_20_gb_is_not_received() -> None:
    with server(announce_a_huge_value) as port:
        [node] = end_all(Node(port, 1, timeout=2, new=True))
    assert node.code == 1
    assert "Traceback" not in node.output


# --- another program that writes to the store -----------------------------------------------------


def connect(port: int) -> TCPStore:
    wait_for_listener(port)
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def published(store: TCPStore, name: str, *, key: str) -> object:
    """Return a value of a message as anyone can read it."""
    return json.loads(store.get(name)[64:])[key] if store.check([name]) else None


def is_plain(text: str) -> bool:
    return text.replace("\n", "").isprintable()


VALID = Message(nonce="n", nodes={"a": "1"}, address="10.0.0.9", port=9, time=1.0, settings={}, result="")
BODY = json.loads(json.dumps({name: getattr(VALID, name) for name in Message.__dataclass_fields__}))
INVALID = {
    "no JSON": b"\xff\x00{",
    "no message": b"[1]",
    "nested": b"[" * 100_000,
    "a field missing": json.dumps({"nonce": ""}).encode(),
    "too long": json.dumps(BODY | {"nodes": {str(number): "1" for number in range(MAX_BYTES // 8)}}).encode(),
    **{
        f"{key} {str(value)[:20]!r}": json.dumps(BODY | {key: value}).encode()
        for key, value in [
            ("nonce", "\x1b[2J"), ("nonce", 7), ("nodes", []), ("nodes", {"a": 1}), ("nodes", {"a": {}}),
            ("address", "a" * 501), ("address", "\u202e"), ("port", -1), ("port", 2**16), ("port", True),
            ("port", 1.5), ("time", float("nan")), ("time", float("inf")),
            ("time", 10**400), ("time", "now"), ("settings", {"\n": ""}),
            ("result", None), ("result", "1 \x9b31m"),
        ]
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def board() -> Board:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
    return Board(store, b"key")


@pytest.mark.parametrize("body", INVALID.values(), ids=INVALID)
def test_an_invalid_message_counts_as_none_even_if_it_is_signed(body: bytes, board: Board) -> None:
    board.publish("name", VALID)
    assert board.read("name") == board.read_untrusted("name") == VALID
    private = board._private("name", "")
    write(board, private, board._mac(private, body) + body)
    write(board, "name", board._mac("name", body) + body)
    assert board.read("name") is None
    assert board.read_untrusted("name") is None


def test_a_message_counts_only_under_its_name_with_its_nonce_and_key(board: Board) -> None:
    board.publish("name", VALID, nonce="1")
    assert board.read("name", nonce="1") == VALID
    signed, other_key = board.store.get("name"), Board(board.store, b"another key")
    for other, name, nonce in ((other_key, "name", "1"), (board, "other", "1"), (board, "name", "2")):
        write(board, other._private(name, nonce), signed)
        assert other.read(name, nonce=nonce) is None
    assert other_key.read_untrusted("name") == VALID
    assert board.read("never written") is None


def write(board: Board, key: str, data: bytes) -> None:
    board.store.set(key, data)  # type: ignore[arg-type]  # it takes bytes too


class Stranger:
    """A program without the job's key that writes to the head's store, in threads until it is closed."""

    def __init__(self, port: int) -> None:
        self.port, self.closed = port, threading.Event()
        self.threads: list[threading.Thread] = []

    def repeat(self, action: Callable[[TCPStore], object], *, pause: float) -> None:
        """Repeat `action` in a thread, with a connection of its own whenever the last one was closed."""

        def go() -> None:
            while not self.closed.is_set():
                with suppress(DistError, OSError):
                    store = TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False,
                                     timeout=timedelta(seconds=1))  # fmt: skip
                    while not self.closed.wait(pause):
                        action(store)

        self.threads.append(threading.Thread(target=go, daemon=True))
        self.threads[-1].start()

    def close(self) -> None:
        self.closed.set()
        for thread in self.threads:
            thread.join(timeout=10)


def sign_badly(**changes: object) -> str:
    return "0" * 64 + json.dumps(BODY | changes)


def send_raw_bytes(store: TCPStore) -> None:
    with socket.create_connection(("127.0.0.1", store.port), timeout=1) as connection:
        connection.sendall(os.urandom(2**16))


def delete_all(store: TCPStore) -> None:
    for key in store.list_keys():
        store.delete_key(key)


def overwrite_all(store: TCPStore) -> None:
    for key in store.list_keys():
        store.set(key, "overwritten")


ATTACKS: list[tuple[Callable[[TCPStore], object], float]] = [
    (lambda store: store.set(f"{NODE}1", sign_badly(result="2 called off")), 0.0),
    (lambda store: store.set(HEAD, sign_badly(result="2 \x1b[31mcalled off")), 0.0),
    (lambda store: store.set(HEAD, sign_badly(result="start")), 0.01),
    (lambda store: store.set(f"{NODE}1", os.urandom(1000).decode("latin-1")), 0.01),
    (lambda store: store.set(HEAD, "x" * 7_000_000), 0.2),
    (lambda store: store.set("torch.rendezvous.none", "state"), 0.1),
    (send_raw_bytes, 0.05),
    (delete_all, 0.1),
    (overwrite_all, 0.1),
]


def test_a_stranger_that_writes_and_deletes_does_not_keep_the_nodes_from_starting(port: int, tmp_path: Path) -> None:
    job = write_jobs(tmp_path, "seed=1")[0]
    head = Node(port, 0, job, timeout=60, new=True)
    wait_for_listener(port)
    with closing(Stranger(port)) as stranger:
        for action, pause in ATTACKS:
            stranger.repeat(action, pause=pause)
        ended = end_all(head, Node(port, 1, job, timeout=60, new=True))
    assert [node.code for node in ended] == [0, 0]
    assert all(node.output.count("\n") == 2 and is_plain(node.output) for node in ended)


def test_a_stranger_takes_no_nodes_place_and_reads_no_config(port: int, tmp_path: Path) -> None:
    head = Node(port, 0, write_jobs(tmp_path, "name=confidential")[0], timeout=5, new=True)
    store = connect(port)
    until(lambda: published(store, HEAD, key="settings"))
    everything = b"".join(store.get(key) for key in store.list_keys())
    assert b"output_dir" in everything
    assert not any(value in everything for value in (b"private", b"confidential", b"lenet"))
    store.set(f"{NODE}1", sign_badly(result="2 \x1b[2Jcalled off", address="10.0.0.9"))
    store.set(f"{NODE}1", sign_badly(result="2 called off", address="10.0.0.9"))
    [head] = end_all(head)
    assert head.code == 1
    came = "10.0.0.9 came as node 1 with other settings, or is not part of this job"
    assert f"error: 1 of 2 nodes came within 5 s, missing: node 1; {came}: start" in head.output
    assert is_plain(head.output)


def test_messages_of_an_earlier_start_count_for_nothing(port: int, tmp_path: Path) -> None:
    """The same config and so, without a secret, the same key: what was recorded is signed rightly."""
    job = write_jobs(tmp_path, "seed=1")[0]
    nodes = [Node(port, rank, job, nnodes="3", timeout=6) for rank in (0, 1)]
    store, recorded = connect(port), {}
    with suppress(DistError):
        while True:
            recorded |= {key: store.get(key) for key in store.list_keys()}
    assert [node.code for node in end_all(*nodes)] == [1, 1]
    assert b"missing: node 2" in recorded[HEAD]

    nodes = [Node(port, 0, job, nnodes="3", timeout=30)]
    wait_for_listener(port)
    with closing(Stranger(port)) as stranger:
        stranger.repeat(lambda store: [store.set(key, data) for key, data in recorded.items()], pause=0.05)
        nodes += [Node(port, rank, job, nnodes="3", timeout=30) for rank in (1, 2)]
        assert [node.code for node in end_all(*nodes)] == [0, 0, 0]
