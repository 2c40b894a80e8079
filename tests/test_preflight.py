"""The roll call of nodes on loopback: real processes, real ports, a real torch store."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished, clean_environment, run_command
from torch.distributed import TCPStore

COMMAND = (sys.executable, "-m", "ddp_trainer.preflight")


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def words(port: int, rank: int, *, nnodes: str = "2", head: str = "127.0.0.1", timeout: float = 10) -> list[str]:
    return [*COMMAND, f"--head={head}", f"--port={port}", f"--nnodes={nnodes}", f"--node-rank={rank}",
            f"--timeout={timeout}"]  # fmt: skip


def together(*commands: list[str]) -> list[Finished]:
    """Run all at once and return how they ended."""
    processes = [
        subprocess.Popen(command, env=clean_environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for command in commands
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    return [Finished(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def test_nodes_meet_and_the_port_is_free_again(port: int) -> None:
    ended = together(*(words(port, rank, nnodes="3") for rank in range(3)))
    assert [node.code for node in ended] == [0, 0, 0], ended
    for rank, node in enumerate(ended):
        assert node.output == f"node {rank} of 3: 127.0.0.1 on lo, head 127.0.0.1:{port}\n127.0.0.1\n"
    TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # as torchrun does next


def test_a_missing_node_is_named_to_all(port: int) -> None:
    head, node = together(words(port, 0, nnodes="4", timeout=3), words(port, 2, nnodes="4", timeout=3))
    missing = "2 of 4 nodes came within 3 s, missing: node 1, node 3"
    assert (head.code, node.code) == (2, 2)
    assert f"error: {missing}" in head.output
    assert f"node 2: called off by the head: {missing}" in node.output


def test_an_elastic_job_starts_with_its_minimum(port: int) -> None:
    head, node = together(words(port, 0, nnodes="2:4"), words(port, 3, nnodes="2:4"))
    assert (head.code, node.code) == (0, 0), head.output + node.output


def test_a_node_that_was_stopped_while_it_waited_may_come_again(port: int) -> None:
    head = subprocess.Popen(
        words(port, 0), env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for_listener(port)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection, connection.makefile("rwb") as lines:
        assert lines.readline() == b"ddp_trainer preflight\n"
    [node] = together(words(port, 1))
    assert (head.wait(30), node.code) == (0, 0), node.output


def wait_for_listener(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("rdzv_id", "code"), [("mine", 0), ("yours", 2)])
def test_a_running_jobs_store_is_joined_and_another_jobs_is_not(rdzv_id: str, code: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("torch.rendezvous.mine", "state")
    [node] = together([*words(store.port, 1, nnodes="1:2", timeout=2), f"--rdzv-id={rdzv_id}"])
    assert node.code == code, node.output
    assert ("is taken by the rendezvous of another job" in node.output) == (code == 2)


@pytest.fixture
def ssh_server() -> Iterator[int]:
    """A program that greets as ssh does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"SSH-2.0-here\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_another_program_at_the_port_is_quoted(ssh_server: int) -> None:
    head, node = together(words(ssh_server, 0), words(ssh_server, 1, timeout=2))
    assert (head.code, node.code) == (2, 2)
    assert f"error: port {ssh_server} is taken on the head by another program" in head.output
    assert "taken by another program, which says 'SSH-2.0-here'" in node.output


def test_configs_are_compared_key_by_key(port: int, tmp_path: Path) -> None:
    commands = []
    for rank, lr in enumerate((0.1, 0.2)):
        file = tmp_path / f"{rank}.json"
        file.write_text(json.dumps({"run_dir": f"/{rank}", "config": {"seed": 0, "optimizer": {"lr": lr}}}))
        commands.append([*words(port, rank), f"--config={file}"])
    head, _ = together(*commands)
    assert "another config (optimizer.lr: 0.1 → 0.2): use one command line" in head.output


def test_nodes_that_expect_different_numbers_are_told(port: int) -> None:
    head, _ = together(words(port, 0, nnodes="3"), words(port, 1, nnodes="2"))
    assert "error: node 1 (127.0.0.1) was started for 2 nodes and the head for 3: say the same on all" in head.output


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rank": 2}, "error: node rank 2 of 2 nodes: number them 0 to 1\n"),
        ({"nnodes": "4:2"}, "error: nnodes 4:2 is no number of nodes: N, or MIN:MAX, from 1\n"),
        ({"port": 0}, "error: port 0 is none: choose one from 1024 to 65535\n"),
        ({"head": "a..b"}, "error: head 'a..b' does not resolve on this host (not a host name): give its address, "
                           "or a name that every node knows\n"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_one_error(change: dict, told: str, port: int) -> None:
    arguments: dict[str, Any] = {"port": port, "rank": 1, **change}
    done = run_command(words(**arguments))
    assert (done.code, done.output) == (2, told)


def test_a_head_that_is_not_there_is_waited_for(port: int) -> None:
    done = run_command(words(port, 1, timeout=1))
    assert done.code == 2
    assert f"nothing listened at 127.0.0.1:{port} for 1 s, and that is each host's own address" in done.output
