"""``logger=wandb``: without a login or a server, with a killed service, beside another run."""

import logging
import os
import pty
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml
from processes import on_ranks, wait_for
from test_logged_runs import items, wandb_launches

from ddp_trainer.config.loggers import WandbConfig, WandbMode
from ddp_trainer.observers.loggers import wandb_run
from ddp_trainer.observers.loggers.wandb_run import WandbLogger


def begin(folder: str, mode: WandbMode = WandbMode.offline) -> WandbLogger:
    """Return the logger of a launch in `folder`, begun."""
    Path(folder, "config.yaml").write_text(yaml.safe_dump({"seed": 1}))
    logger = WandbLogger(WandbConfig(mode=mode), Path(folder))
    logger.start(0)
    return logger


def services() -> list[int]:
    """Return the processes that wandb has started in this one and that have not ended."""
    pids = [
        int(pid)
        for path in Path("/proc/self/task").glob("*/children")
        for pid in path.read_text().split()
    ]
    return [
        pid
        for pid in pids
        if "wandb-core" in Path(f"/proc/{pid}/comm").read_text() and is_running(pid)
    ]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@contextmanager
def warnings_of(package: str) -> Iterator[list[str]]:
    """Yield a list to which the package's log records are appended."""
    warnings: list[str] = []
    logging.getLogger(package).addHandler(handler := logging.Handler())
    handler.emit = lambda record: warnings.append(record.getMessage())
    yield warnings


def begin_in_a_terminal(folder: str) -> tuple[str, list[str]]:
    """Begin and close in a terminal, where wandb would ask for a login. Return the output and the
    warnings.
    """
    ours, theirs = pty.openpty()
    for descriptor in (0, 1, 2):
        os.dup2(theirs, descriptor)
    sys.stdin = os.fdopen(0)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w")
    os.environ |= {"HOME": folder, "NETRC": f"{folder}/netrc", "WANDB_API_KEY": "", "TERM": "xterm"}
    with warnings_of("ddp_trainer") as warnings:
        logger = begin(folder, WandbMode.online)
        logger.scalars({"epoch": 0, "a": 1.0}, 1)
        logger.close()
    print("end", flush=True)
    return os.read(ours, 65536).decode(), warnings


def test_without_a_login_it_asks_nothing_and_records_offline(tmp_path: Path) -> None:
    [(output, [warning])] = on_ranks(1, begin_in_a_terminal, str(tmp_path))
    assert output == "end\r\n"
    assert re.fullmatch(
        r"logger=wandb records offline \(.*No API key.*\); upload with: wandb sync .*", warning
    )
    [records] = wandb_launches(tmp_path)
    assert sum(record.HasField("history") for record in records) == 1


def begin_without_a_server(folder: str) -> list[str]:
    """Record while the server refuses connections. Return the warnings."""
    wandb_run.TIMEOUTS["init_timeout"] = 2.0
    os.environ |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40}
    with warnings_of("ddp_trainer") as warnings:
        logger = begin(folder, WandbMode.auto)
        logger.scalars({"epoch": 0, "a": 1.0}, 1)
        logger.close()
    return warnings


def test_without_a_server_it_records_offline(tmp_path: Path) -> None:
    [[warning]] = on_ranks(1, begin_without_a_server, str(tmp_path))
    assert re.fullmatch(r"logger=wandb records offline \(CommError: .*\); upload with: .*", warning)
    [records] = wandb_launches(tmp_path)
    assert sum(record.HasField("history") for record in records) == 1


def record_after_a_kill(folder: str) -> int:
    """Record until the kill of the service process is noticed. Return the number of services."""
    logger = begin(folder)
    for pid in services():
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: not is_running(pid))

    def fails() -> bool:
        try:
            logger.scalars({"epoch": 0, "a": 1.0}, 1)
        except Exception:
            return True
        return False

    wait_for(fails, seconds=30)
    assert fails()
    with suppress(Exception):
        logger.close()
    return len(services())


def test_after_a_kill_of_the_service_calls_fail_until_the_end(tmp_path: Path) -> None:
    assert on_ranks(1, record_after_a_kill, str(tmp_path)) == [0]


def record_beside_another(folder: str) -> None:
    """Record while the program of a user has a run of wandb."""
    import wandb

    theirs = wandb.init(
        mode="offline", dir=folder, project="theirs", settings=wandb.Settings(silent=True)
    )
    theirs.log({"b": 1})
    (Path(folder) / "run").mkdir()
    logger = begin(f"{folder}/run")
    logger.scalars({"epoch": 0, "a": 1.0}, 1)
    logger.close()
    assert wandb.run is theirs
    theirs.log({"b": 2})
    assert services()
    theirs.finish()
    wandb.teardown()


def test_another_run_of_wandb_in_the_process_is_left_alone(tmp_path: Path) -> None:
    on_ranks(1, record_beside_another, str(tmp_path))
    for run_dir, key, count in ((tmp_path, "b", 2), (tmp_path / "run", "a", 1)):
        [records] = wandb_launches(run_dir)
        rows = [items(record.history.item) for record in records if record.HasField("history")]
        assert [key in row for row in rows] == [True] * count
