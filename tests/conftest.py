"""Real processes with a deadline: what most tests are made of."""

import atexit
import faulthandler
import json
import multiprocessing
import os
import queue
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddp_trainer.distributed.environment import limit_spinning, plugin_modules, read_environment

limit_spinning()  # as the command line does: the tests that run at the same time share the cores

# ruff: noqa: E402
import hydra
import torch
from torch.distributed import TCPStore
from torch.utils._pytree import tree_flatten_with_path

from ddp_trainer import registry
from ddp_trainer.config.composition import config_dir, register_configs, to_config
from ddp_trainer.config.messages import check_overrides
from ddp_trainer.config.schema import Config
from ddp_trainer.distributed.process_group import World, process_group
from ddp_trainer.training.run import run

TINY = ("model=lenet", "data=synthetic", "data.num_train=96", "data.num_eval=31", "data.channels=1",
        "data.height=12", "data.width=12", "data.mean=[0.5]", "data.std=[0.25]", "precision=fp32",
        "global_batch_size=12", "epochs=2")  # fmt: skip
"""Overrides for a run of 16 steps that takes a fraction of a second once torch is imported."""
BATCHNORM = ("model=timm", "model.arch=test_resnet")
"""Overrides for a small model with BatchNorm: 373,370 parameters for images with one channel."""


def pytest_configure() -> None:
    """Load plug-ins, and undo what a shell does to `make test &`: all processes of the tests would ignore SIGINT."""
    registry.load_plugins(plugin_modules())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Finished(NamedTuple):
    """The exit code of a launch, and its stdout and stderr as a user sees them."""

    code: int
    output: str


def clean_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without what a launcher or Hydra put there."""
    ours = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HYDRA_FULL_ERROR"]
    return {key: value for key, value in os.environ.items() if key not in ours} | extra


def torchrun(ranks: int, *options: str) -> list[str]:
    """Return the words that start torchrun on this machine, with a port of its own, so that several can run at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc_per_node={ranks}",
            "--master-addr=127.0.0.1", f"--master-port={port}", *options]  # fmt: skip


def start_command(command: Sequence[str], *, cwd: Path | None = None, **extra: str) -> subprocess.Popen[str]:
    """Start `command` in a session of its own, with both its outputs in one pipe."""
    return subprocess.Popen(
        command, cwd=cwd, env=clean_environment(PYTHONFAULTHANDLER="1", **extra), text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run_command(command: list[str], *, deadline: float = 120, cwd: Path | None = None, **extra: str) -> Finished:
    """Run `command` in a session of its own; past `deadline` seconds end all of it and fail the test."""
    process = start_command(command, cwd=cwd, **extra)
    try:
        output, _ = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        end_with_descendants(process)
        output, _ = process.communicate()
        pytest.fail(f"still running after {deadline} s: {' '.join(command)}\n{output}")
    return Finished(process.returncode, output)


def processes_with(variable: str) -> list[int]:
    """Return the ids of the processes that have ``NAME=value`` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def end_with_descendants(process: Any) -> None:
    """Abort the processes that `process` has started, which write their stacks, and kill all of them."""
    tree = [process.pid]
    for pid in tree:  # grows
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            tree += map(int, task.read_text().split())
    for number, pids in ((signal.SIGABRT, tree[1:]), (signal.SIGKILL, tree)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(1)


def launch(*overrides: str, ranks: int | None = None, deadline: float = 120, cwd: Path | None = None,
           module: str = "ddp_trainer", **extra: str) -> Finished:  # fmt: skip
    """Run the command line with `overrides`: plain python for ranks=None, else torchrun with so many ranks.

    The process is forked from one that has imported torch, to save a second, unless `extra` variables could change how
    Python starts.
    """
    if ranks is not None:
        return _run_forked([*torchrun(ranks)[2:], "-m", module, *overrides], cwd or Path.cwd(), deadline, **extra)
    if module == "ddp_trainer" and not extra:
        return _run_forked(["ddp_trainer", *overrides], cwd or Path.cwd(), deadline)
    return run_command([sys.executable, "-m", module, *overrides], deadline=deadline, cwd=cwd, **extra)


def succeed(*overrides: str, **options: Any) -> Finished:
    """Launch, and fail the test with the output unless the exit code is 0."""
    done = launch(*overrides, **options)
    assert done.code == 0, done.output
    return done


def wait_for(condition: Callable[[], object], *, seconds: float = 90) -> None:
    """Return once `condition` holds; fail the test after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def records(run_dir: Path, tag: str | None = None) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl, or those that have `tag`."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if tag is None or tag in line]


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return what summary.json holds."""
    return json.loads((run_dir / "summary.json").read_text())


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest step checkpoint, 0 if there is none."""
    return max((int(path.stem[5:]) for path in (run_dir / "checkpoints").glob("step-*.pt")), default=0)


def newest_checkpoint(run_dir: Path) -> dict[str, Any]:
    """Return the state in the newest step checkpoint."""
    return torch.load(run_dir / f"checkpoints/step-{newest_step(run_dir):08d}.pt", weights_only=True)


def trained_state(run_dir: Path) -> dict[str, Any]:
    """Return what the last checkpoint says of training, less the clock."""
    state = newest_checkpoint(run_dir)
    state.pop("config")
    state["progress"].pop("seconds")
    return state


def assert_bitwise(left: Any, right: Any) -> None:
    """Assert that two states are equal, tensors bit by bit."""
    (ours, structure), (theirs, other_structure) = tree_flatten_with_path(left), tree_flatten_with_path(right)
    assert structure == other_structure
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        assert type(one) is type(other), path
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, path
            assert torch.equal(one, other), path
        else:
            assert one == other, path


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """Return environment variables under which importing torch fails."""
    (tmp_path / "no" / "torch").mkdir(parents=True)
    (tmp_path / "no" / "torch" / "__init__.py").write_text("raise ImportError('torch was imported')")
    root, already = Path(__file__).parents[1], os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "no"), str(root), *([already] if already else [])])}


@pytest.fixture
def train_in(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that trains under tmp_path/<name> on `ranks` ranks and returns the run directory."""

    def go(name: str, *overrides: str, ranks: int = 1, deadline: float = 60) -> Path:
        train_on(ranks, f"output_dir={tmp_path}", f"name={name}", *overrides, deadline=deadline)
        return tmp_path / name

    return go


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train twenty steps on handwritten digits; return the run directory, which tests leave as it is."""
    folder = tmp_path_factory.mktemp("digits")
    train_on(2, "model=lenet", "data=digits", "precision=fp32", "max_steps=20", "logger=[]", f"output_dir={folder}",
             "name=run")  # fmt: skip
    return folder / "run"


@contextmanager
def memory_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount memory as a disk at `folder`, with options of tmpfs."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs (root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount 4 MiB of memory as a disk."""
    with memory_disk(tmp_path / "disk", "size=4m") as folder:
        yield folder


# --- ranks without torchrun: forked from a process that has imported torch, so that a test takes a second -----


def _rank(rank: int, world_size: int, port: int, results: Any, function: Callable[..., Any], args: tuple) -> None:
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(number) for name, number in (numbers | {"MASTER_PORT": port}).items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        results.put((rank, function(*args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def forkserver() -> Any:
    """Return the multiprocessing context whose processes are forked from one that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    modules = ["ddp_trainer.training.run", "torch._dynamo", "torch.utils.tensorboard", "torchvision.models"]
    context.set_forkserver_preload([*modules, "conftest"])  # not timm, which imports wandb
    return context


def _command_line(words: Sequence[str], cwd: Path, variables: dict[str, str], output: str) -> None:
    """Become ``python -m`` with `words`, which writes stdout and stderr to the file `output`."""
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ |= variables
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    sys.argv = list(words)
    faulthandler.enable()
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing does not call


def _run_forked(words: Sequence[str], cwd: Path, deadline: float, **extra: str) -> Finished:
    with tempfile.NamedTemporaryFile("r+") as output:
        arguments = (words, cwd, clean_environment(PYTHONFAULTHANDLER="1", **extra), output.name)
        process = forkserver().Process(target=_command_line, args=arguments)
        process.start()
        process.join(deadline)
        if process.exitcode is None:
            end_with_descendants(process)
            pytest.fail(f"still running after {deadline} s: {' '.join(words)}\n{output.read()}")
        return Finished(process.exitcode, output.read())


def _start(world_size: int, results: Any, function: Callable[..., Any], args: tuple) -> tuple[list[Any], TCPStore]:
    context = forkserver()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_rank, args=(rank, world_size, store.port, results, function, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes, store


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any, deadline: float = 60) -> list[Any]:
    """Call a module-level ``function(*args)`` in `world_size` processes; return the results, plain data, by rank."""
    results = forkserver().Queue()
    processes, _store = _start(world_size, results, function, args)
    try:
        answers = sorted((results.get(timeout=deadline) for _ in processes), key=lambda answer: answer[0])
    except queue.Empty:
        pytest.fail(f"{function.__name__} on {world_size} ranks: no answer in {deadline} s")
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    for _, _, error in answers:
        assert error is None, error
    assert [process.exitcode for process in processes] == [0] * world_size
    return [value for _, value, _ in answers]


def start_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a module-level ``function(*args)`` in so many processes and return them at once: to be killed, say."""
    results = forkserver().Queue()
    processes, store = _start(world_size, results, function, args)
    processes[0].needed = (results, store)  # as long as the processes live
    return processes


def kill_in_training(world_size: int, config: Config, run_dir: Path, *, after: float) -> None:
    """Train in processes of this job's own, and kill them all `after` seconds after their first save."""
    before = newest_step(run_dir)
    processes = start_ranks(world_size, train, config)
    wait_for(lambda: newest_step(run_dir) > before)
    time.sleep(after)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def compose(*overrides: str) -> Config:
    """Return the config that the command line would make of `overrides`."""
    check_overrides(overrides)
    register_configs()
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        return to_config(hydra.compose("config", list(overrides)))


@contextmanager
def in_process_group(config: Config) -> Iterator[World]:
    """Join the process group of this process's ranks as `config` says, and leave it again."""
    names = ("device", "backend", "num_threads", "timeout_seconds")
    with process_group(read_environment(), **{name: getattr(config, name) for name in names}) as world:
        yield world


def train(config: Config) -> str:
    """Train as one rank, in one of the processes that `on_ranks` and `start_ranks` start."""
    return run(config).to_json()


def train_on(world_size: int, *overrides: str, deadline: float = 60) -> dict[str, Any]:
    """Train with `overrides` on so many ranks and return the summary."""
    return json.loads(on_ranks(world_size, train, compose(*overrides), deadline=deadline)[0])


def _train_one_after_another(configs: list[Config]) -> None:
    with in_process_group(configs[0]):
        for config in configs:
            run(config)


def train_all(world_size: int, jobs: list[tuple[str, ...]], *, deadline: float = 240) -> None:
    """Train `jobs`, each its overrides, one after another in one process group: a run then takes half a second."""
    on_ranks(world_size, _train_one_after_another, [compose(*overrides) for overrides in jobs], deadline=deadline)


# --- CI: a skipped test is a failed run -----------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make a skipped test a failed one if CI=true, unless it needs a GPU."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and "gpu" not in report.keywords:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"CI must not skip {item.nodeid}: {reason}"
    return report


# --- faults: a table of what was tried, and how often all was well -------------------------------

FAULTS: dict[str, list[int]] = {}


def trials(count: int) -> int:
    """Return `count`, or a part of it on a slow machine, where .ci/run sets FEWER_TRIALS to a divisor."""
    return max(2, count // int(os.environ.get("FEWER_TRIALS", "1")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in tests/chaos and tests/cluster: `make test` leaves it to the target of that name."""
    for item in items:
        for folder in {"chaos", "cluster"} & set(item.path.parts):
            item.add_marker(folder)
        item.user_properties += [("fault", (m.args[0], m.kwargs.get("times", 1))) for m in item.iter_markers("fault")]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add what a test that is marked with ``fault(name, times=1)`` has tried to the table."""
    faults: Any = [value for key, value in report.user_properties if key == "fault"]
    if report.when == "call" or report.failed:
        for name, times in faults:
            row = FAULTS.setdefault(name, [0, 0])
            row[0] += times
            row[1] += times if report.passed else 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FAULTS:
        terminalreporter.section("faults")
        for name, (tried, survived) in [("fault", ("tried", "survived")), *FAULTS.items()]:
            terminalreporter.write_line(f"{name:80} {tried:>6} {survived:>8}")
