"""The process group: its collectives, joining after a restart, and what the launch environment
says.
"""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from processes import launch, on_ranks
from runs import TINY

from ddp_trainer.config.errors import USER_ERROR, ConfigError, require
from ddp_trainer.config.schema import Backend, Device
from ddp_trainer.distributed.environment import (
    check_interface,
    interface_towards,
    read_environment,
    set_interface,
)
from ddp_trainer.distributed.graceful_stop import GracefulStop
from ddp_trainer.distributed.process_group import join_round, prepare, process_group
from ddp_trainer.distributed.world import World

CPU: dict[str, Any] = {"device": Device.cpu, "backend": Backend.auto, "num_threads": 1}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}


def value_of(rank: int) -> dict[str, Any]:
    """Return a value whose JSON has another length on every rank."""
    return {
        "rank": rank,
        "text": "größe\n" * rank,
        "numbers": [rank / 3, None, True],
        "nothing": {},
    }


def message_of(world: World, failing: dict[int, str]) -> str:
    message = failing.get(world.rank, "")
    try:
        world.raise_on_any_rank(lambda: require(not message, message))
    except ConfigError as error:
        return str(error)
    return ""


def use_collectives() -> dict[str, Any]:
    with process_group(read_environment(), timeout_seconds=30, **CPU) as world:
        failures = ({1: "bad"}, {0: "bad", 1: "worse"}, {0: "x", 1: "x"}, {})
        return {
            "gathered": world.all_gather_object(value_of(world.rank)),
            "object": world.broadcast_object(value_of(world.rank)),
            "bytes": list(
                world.broadcast_bytes(bytes([world.rank]) * (1000 if world.is_main else 3))
            ),
            "empty": list(world.broadcast_bytes(b"" if world.is_main else b"other")),
            "messages": [message_of(world, failing) for failing in failures],
        }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_return_the_same_values_on_all_ranks(world_size: int) -> None:
    results = on_ranks(world_size, use_collectives)
    assert results == [results[0]] * world_size
    assert results[0]["gathered"] == [value_of(rank) for rank in range(world_size)]
    assert results[0]["object"] == value_of(0)
    assert results[0]["bytes"] == [0] * 1000
    assert results[0]["empty"] == []
    assert results[0]["messages"] == ["" if world_size == 1 else "rank 1: bad", "bad", "x", ""]


def join_twice() -> list[int]:
    sizes = []
    with process_group(read_environment(), timeout_seconds=30, **CPU):
        for _ in range(2):  # as the jobs of a sweep do
            with process_group(read_environment(), timeout_seconds=30, **CPU) as world:
                sizes.append(len(world.all_gather_object(None)))
    assert not dist.is_initialized()
    return sizes


def test_the_jobs_of_a_sweep_share_one_group() -> None:
    assert on_ranks(2, join_twice) == [[2, 2], [2, 2]]


def join_late(is_announced: bool) -> str:
    """Join 9 s after the others of a group whose ranks wait for 5 s."""
    environment = read_environment()
    if environment.rank == 1:
        if is_announced:
            prepare(lambda: time.sleep(9), environment)
        else:
            time.sleep(9)
    try:
        with process_group(environment, timeout_seconds=5, **CPU) as world:
            return f"{len(world.all_gather_object(None))} ranks"
    except TimeoutError as error:
        return str(error)


def test_ranks_wait_for_one_that_announces_that_it_is_busy_and_name_one_that_does_not() -> None:
    with ThreadPoolExecutor() as pool:  # both only wait
        announced, silent = (
            pool.submit(on_ranks, 3, join_late, is_announced) for is_announced in (True, False)
        )
        assert announced.result() == ["3 ranks"] * 3
        assert silent.result()[0] == "2 of 3 ranks came within 5 s, missing: 1"


def test_a_rank_without_rank_0_names_the_other_missing_ranks_too() -> None:
    with pytest.raises(TimeoutError, match=r"^1 of 3 ranks came within 1 s, missing: 0, 2$"):
        join_round(dist.HashStore(), rank=1, world_size=3, timeout=timedelta(seconds=1))


def join_again() -> list[str]:
    """Join twice in one store, as ranks do that torchrun has restarted."""
    environment = read_environment()
    store = dist.TCPStore(environment.master_addr, environment.master_port, is_master=False)
    values = []
    for attempt in range(2):
        view = join_round(store, rank=environment.rank, world_size=2, timeout=timedelta(seconds=20))
        # a new view holds no value
        values.append(view.compare_set("first", "", str(attempt)).decode())
        store.set(f"ended/{attempt}/{environment.rank}", "")
        # torchrun ends all ranks before it restarts them
        store.wait([f"ended/{attempt}/{r}" for r in range(2)])
    return values


def test_a_restart_does_not_see_the_store_of_the_start_before() -> None:
    assert on_ranks(2, join_again) == [["0", "1"], ["0", "1"]]


# --- the environment ----------------------------------------------------------------------------


def test_the_interface_that_routes_to_rank_0_is_used_unless_one_is_set() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no-such-host.invalid") is None
    environment = read_environment(TORCHRUN | {"MASTER_ADDR": "127.0.0.1"})
    for chosen in ({}, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib0"}):
        set_interface(environment, variables := dict(chosen))
        assert variables == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"} | chosen


def test_an_interface_that_a_node_lacks_is_one_error() -> None:
    environment = read_environment(TORCHRUN | {"MASTER_ADDR": "127.0.0.1"})
    with pytest.raises(ConfigError, match=r"eth77 names no network interface .* choose from .*lo"):
        set_interface(environment, {"GLOO_SOCKET_IFNAME": "lo,eth77"})


def test_an_interface_without_an_address_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces = [*socket.if_nameindex(), (10**6, "eth77")]
    monkeypatch.setattr(socket, "if_nameindex", lambda: interfaces)
    with pytest.raises(ConfigError, match=r"eth77 names no network interface .* choose from .*lo"):
        check_interface({"GLOO_SOCKET_IFNAME": "eth77"})


def test_one_process_names_a_wrong_interface(tmp_path: Path) -> None:
    done = launch(*TINY, f"output_dir={tmp_path}", GLOO_SOCKET_IFNAME="eth77")
    assert done.code == USER_ERROR, done.output
    [line] = done.output.splitlines()
    assert line.startswith("error: GLOO_SOCKET_IFNAME=eth77 names no network interface")


def test_a_restart_by_torchrun_or_slurm_is_known() -> None:
    assert not read_environment(
        TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "0"}
    ).is_restart
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        assert read_environment(TORCHRUN | {name: "2"}).is_restart


def test_a_restart_that_torchrun_does_not_count_is_known(tmp_path: Path) -> None:
    def start() -> bool:
        """Start as another process would, in which torchrun has made the folder of the attempt
        again.
        """
        (tmp_path / "attempt_0/1").mkdir(parents=True, exist_ok=True)
        environment = read_environment(
            TORCHRUN | {"TORCHELASTIC_ERROR_FILE": f"{tmp_path}/attempt_0/1/error.json"}
        )
        environment.record_start()
        return environment.is_restart

    assert not start()
    assert not start()  # of the same process: a second job of a sweep
    (tmp_path / "started-1").write_text(str(os.getppid()))
    assert start()


@pytest.mark.fault("MASTER_PORT out of range")
@pytest.mark.parametrize("port", ["0", "65536", "999999", "9" * 5000])
def test_a_port_that_is_not_valid_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match=f"^MASTER_PORT={port[:80]} must be "):
        read_environment(TORCHRUN | {"MASTER_PORT": port})


@pytest.mark.fault("a stop file in an unreadable folder")
def test_a_stop_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file/stop", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match=r"^DDP_TRAINER_STOP_FILE=.* cannot be read \("):
            GracefulStop(path)
    with GracefulStop(tmp_path / "folder/stop") as stop:  # the folder may be created later
        assert not stop.poll()
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder/stop").touch()
        assert stop.poll()
    assert stop.is_set
