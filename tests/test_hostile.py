"""Run directories and files of a stranger: one error, nothing outside is changed, nothing hangs."""

import copy
import json
import os
import shlex
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import memory_disk
from PIL import Image
from processes import launch, plugins, run_command, succeed
from runs import TINY, newest_step
from torch import Tensor

from ddp_trainer.checkpoint.file import (
    DamagedCheckpointError,
    State,
    read_state,
    write_file,
)
from ddp_trainer.config.errors import USER_ERROR, ConfigError
from ddp_trainer.data.dataset import BadImageError
from ddp_trainer.data.images.pixel_cache import PIXELS, RECORDS, open_cache, read_records
from ddp_trainer.models.weight_files import find_weights
from ddp_trainer.observers.loggers.jsonl import read_records as read_records_of
from ddp_trainer.scores.files import replace_folder

WORDS = (*TINY, "epochs=1", "logger=[jsonl]")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    succeed(*WORDS, f"output_dir={folder}", "name=run")
    return folder / "run"


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished run."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def refused(*words: str, cwd: Path) -> str:
    """Return the only line of a command that is refused, within seconds."""
    done = launch(*words, cwd=cwd, deadline=40)
    assert done.code == USER_ERROR, done.output
    assert "Traceback" not in done.output, done.output
    return done.output.splitlines()[-1]


def resume(run_dir: Path) -> tuple[str, ...]:
    return (*WORDS, "epochs=2", f"output_dir={run_dir.parent}", "name=run")


def spoil(run_dir: Path, change: Callable[[State], Any]) -> None:
    """Change the state in the newest checkpoint and in best.pt."""
    for name in (f"step-{newest_step(run_dir):08d}.pt", "best.pt"):
        path = run_dir / "checkpoints" / name
        state = copy.deepcopy(read_state(path))
        change(state)
        write_file(path, state)


@pytest.mark.parametrize("split", ["x/../../../victim", "../victim", "", "train"])
def test_the_split_in_a_checkpoint_leads_nowhere_else(
    split: str, run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/precious").write_text("mine")
    spoil(run_dir, lambda state: state.update(eval_split=split))
    assert "eval_split" in refused("evaluate", str(run_dir), cwd=tmp_path)
    assert (tmp_path / "victim/precious").read_text() == "mine"


@pytest.mark.parametrize("name", ["train.log", "metrics.jsonl", "pictures/first_batch.png"])
@pytest.mark.parametrize("kind", ["hard link", "pipe", "device"])
def test_what_is_no_file_of_its_own_is_refused(
    kind: str, name: str, run_dir: Path, tmp_path: Path
) -> None:
    path = run_dir / name
    path.unlink(missing_ok=True)
    (tmp_path / "victim").write_text("mine")
    if kind == "hard link":
        os.link(tmp_path / "victim", path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        make_device(path)
    reason = "is a hard link" if kind == "hard link" else "is not a regular file"
    assert f"{path} {reason}" in refused(*resume(run_dir), cwd=tmp_path)
    assert (tmp_path / "victim").read_text() == "mine"


def make_device(path: Path) -> None:
    """Make a node of /dev/null; skip the test without the right to do so."""
    try:
        os.mknod(path, 0o20666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("needs the right to make a device (root)")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_report_replaces_only_files(kind: str, run_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    {"pipe": os.mkfifo, "device": make_device, "folder": Path.mkdir}[kind](output)
    before = output.stat()
    line = refused("report", str(run_dir), f"output={output}", cwd=tmp_path)
    assert f"{output} is a folder, a device or a broken link" in line
    assert output.stat() == before


@pytest.mark.parametrize("kind", ["link", "pipe", "file"])
@pytest.mark.parametrize("name", ["best-test", ".best-test.old", ".best-test.writing"])
def test_an_evaluation_replaces_only_folders(name: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "evaluation"
    folder.mkdir()
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/precious").write_text("mine")
    path = folder / name
    {"link": lambda: path.symlink_to(tmp_path / "victim"), "pipe": lambda: os.mkfifo(path)}.get(
        kind, path.touch
    )()
    if name == "best-test":
        with (
            pytest.raises(ValueError, match="is a link or a file: remove it"),
            replace_folder(folder / "best-test"),
        ):
            pass
    else:
        with replace_folder(folder / "best-test") as new:
            (new / "metrics.json").write_text("{}")
        assert (folder / "best-test/metrics.json").read_text() == "{}"
        assert not os.path.lexists(path)
    assert (tmp_path / "victim/precious").read_text() == "mine"


WEIGHT = "0.weight"
TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "huge": lambda tensor: torch.zeros(1).expand(2**36),
    "sparse": lambda tensor: torch.zeros(5, 5).to_sparse(),
    "on no device": lambda tensor: tensor.to("meta"),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
    "of 8 bits": lambda tensor: tensor.to(torch.float8_e4m3fn),
}
OTHER_TYPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "infinite as float32": lambda tensor: tensor.double() * 1e300,
    "complex": lambda tensor: tensor.to(torch.complex64),
    "half": lambda tensor: tensor.half(),
}


@pytest.mark.parametrize("kind", OTHER_TYPES)
@pytest.mark.parametrize("command", ["evaluate", "train", "export"])
def test_a_weight_of_another_type_is_refused(
    command: str, kind: str, run_dir: Path, tmp_path: Path
) -> None:
    spoil(
        run_dir,
        lambda state: state["model"].update({WEIGHT: OTHER_TYPES[kind](state["model"][WEIGHT])}),
    )
    words = resume(run_dir) if command == "train" else (command, str(run_dir))
    line = refused(*words, cwd=tmp_path)
    assert f"{WEIGHT} is torch." in line, line


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("command", ["evaluate", "train"])
def test_an_odd_tensor_is_damage(command: str, kind: str, run_dir: Path, tmp_path: Path) -> None:
    spoil(
        run_dir,
        lambda state: state["model"].update({WEIGHT: TENSORS[kind](state["model"][WEIGHT])}),
    )
    words = resume(run_dir) if command == "train" else (command, str(run_dir))
    line = refused(*words, cwd=tmp_path)
    assert "none of the 1 checkpoints" in line or "has content of a wrong type" in line, line


MOMENTA: dict[str, Callable[[dict[int, Any]], Any]] = {
    "short": lambda state: state[0].update(momentum_buffer=torch.zeros(1)),
    "long": lambda state: state[0].update(momentum_buffer=torch.zeros(10**6)),
    "of another layer": lambda state: state[0].update(state[1]),
    "a text": lambda state: state[0].update(momentum_buffer="x"),
    "none": lambda state: state[0].update(momentum_buffer=None),
    "missing": lambda state: state[0].clear(),
    "of no parameter": lambda state: state.pop(0),
}


@pytest.mark.parametrize("kind", MOMENTA)
def test_a_momentum_that_does_not_fit_is_refused(kind: str, run_dir: Path, tmp_path: Path) -> None:
    spoil(run_dir, lambda state: MOMENTA[kind](state["optimizer"]["state"]))
    assert "holds something else than the state of this run" in refused(
        *resume(run_dir), cwd=tmp_path
    )
    assert "resumed from" not in (run_dir / "train.log").read_text()


def test_a_checkpoint_does_not_replace_the_settings_of_the_optimizer(
    run_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(run_dir, tmp_path / "good/run")
    spoil(
        run_dir,
        lambda state: state["optimizer"]["param_groups"][0].update(
            maximize=True, momentum="x", initial_lr=5.0, params=[3, 2, 1, 0], weight_decay=[1]
        ),
    )
    for folder in (run_dir, tmp_path / "good/run"):
        succeed(*resume(folder), cwd=tmp_path)
    models = [
        read_state(folder / "checkpoints/step-00000016.pt")["model"]
        for folder in (run_dir, tmp_path / "good/run")
    ]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


@pytest.mark.parametrize("step", [-5, 0, 7, 10**12])
def test_a_step_that_is_not_that_of_the_file_is_damage(
    step: int, run_dir: Path, tmp_path: Path
) -> None:
    spoil(run_dir, lambda state: state.update(step=step))
    assert "none of the 1 checkpoints" in refused(*resume(run_dir), cwd=tmp_path)


def test_aliases_in_a_config_are_refused(run_dir: Path, tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with open(run_dir / "config.yaml", "a") as file:
        file.write("\n".join(lines))
    assert "has YAML aliases" in refused(*resume(run_dir), cwd=tmp_path)
    merged = ["a0: &a0 {x: 1}"]
    merged += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 9)]
    (run_dir / "config.yaml").write_text("\n".join(merged))
    succeed("report", str(run_dir), cwd=tmp_path, deadline=40)
    assert "config.yaml is damaged" in (run_dir / "report.html").read_text()


def test_a_plugin_that_exits_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    done = launch(*WORDS, cwd=tmp_path, **plugins("leaves", tmp_path))
    assert done.code == USER_ERROR
    assert "plug-in leaves cannot be imported (SystemExit" in done.output


def test_a_link_in_a_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "x.cache.building").mkdir()
    (tmp_path / "x.cache.building/pixels").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match="is a link or no file of a cache"):
        open_cache(tmp_path / "x.cache", lambda index: torch.zeros(3, 2, 2), count=2)
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_pipe_as_input_is_refused(run_dir: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    line = refused(*WORDS, f"model.weights={tmp_path}/pipe.png", cwd=tmp_path)
    assert "is not a regular file" in line
    done = launch("predict", str(run_dir), f"{tmp_path}/pipe.png", cwd=tmp_path, deadline=40)
    assert "pipe.png cannot be read: it is not a regular file" in done.output


def test_a_log_that_cannot_be_opened_is_one_error(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "train.log").unlink()
    (run_dir / "train.log").mkdir()
    assert "train.log cannot be written (Is a directory)" in refused(*resume(run_dir), cwd=tmp_path)


def test_links_in_a_folder_of_runs_are_followed_once_or_not_at_all(
    run_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    run_dir.rename(folder / "run")
    (folder / "latest").symlink_to("run")
    (folder / "loop").symlink_to("loop")
    outside = tmp_path / "outside/best-test"
    outside.mkdir(parents=True)
    (outside / "metrics.json").write_text('{"secret": 1}')
    (folder / "run/evaluation").mkdir(exist_ok=True)
    (folder / "run/evaluation/best-test").symlink_to(outside)
    (folder / "run/evaluation/loop").symlink_to("loop")
    succeed("report", str(folder), cwd=tmp_path, deadline=40)
    page = (folder / "report.html").read_text()
    assert "Report on run" in page
    assert "evaluation/best-test is a link out of the folder" in page
    assert "secret" not in page
    paths = [str(path) for path in sorted(folder.iterdir()) if path.name in ("report.html", "run")]
    succeed("report", *paths, "output=other.html", cwd=tmp_path, deadline=40)  # sweep/*


def test_an_integer_of_a_million_digits_is_only_described(run_dir: Path, tmp_path: Path) -> None:
    with open(run_dir / "config.yaml", "a") as file:
        file.write(f"large: {'59:' * 3000}1\n")  # base 60, a number of YAML 1.1
    succeed("report", str(run_dir), cwd=tmp_path, deadline=40)
    assert "an integer of" in (run_dir / "report.html").read_text()


def test_a_plugin_whose_version_fails_is_an_error(tmp_path: Path) -> None:
    text = "def __getattr__(name):\n    raise RuntimeError('no ' + name)\n"
    (tmp_path / "odd.py").write_text(text)
    done = launch(*WORDS, cwd=tmp_path, **plugins("odd", tmp_path))
    assert done.code == USER_ERROR
    assert "plug-in odd cannot be imported (RuntimeError: no __version__)" in done.output


def test_a_job_file_is_a_regular_file_with_a_path(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    line = refused("freeze", str(pipe), *WORDS, cwd=tmp_path)
    assert line.endswith("a broken link, which is not replaced: name another job file")
    assert pipe.is_fifo()
    assert "is a folder or a device" in refused("train", f"job_file={pipe}", cwd=tmp_path)
    succeed("freeze", f"{tmp_path}/job.json", *WORDS, "name=run", cwd=tmp_path)
    job = json.loads((tmp_path / "job.json").read_text())
    (tmp_path / "job.json").write_text(json.dumps(job | {"run_dir": "a\0b"}))
    line = refused("train", f"job_file={tmp_path}/job.json", cwd=tmp_path)
    assert "is not a job file" in line


def test_a_reason_in_a_cache_may_be_any_bytes(tmp_path: Path) -> None:
    def read(index: int) -> Tensor:
        raise BadImageError("broken é")

    folder = tmp_path / "x.cache"
    open_cache(folder, read, count=1)
    content = (folder / PIXELS).read_bytes()[:-1] + b"\xff"
    (folder / PIXELS).write_bytes(content)
    records = read_records(folder).copy()
    records["crc32"] = zlib.crc32(content, 0)
    (folder / RECORDS).write_bytes(records.tobytes())
    with pytest.raises(BadImageError, match="broken"):
        open_cache(folder, read, count=1)[0]


def test_names_with_many_dots_are_searched_in_seconds(tmp_path: Path) -> None:
    shapes = {f"a.b.c.{number}": torch.Size([]) for number in range(20_000)}
    zero = torch.zeros(())
    tensors = {f"p{number}.{name}": zero for number, name in enumerate(shapes)}
    torch.save(tensors, tmp_path / "weights.pt")
    began = time.process_time()
    assert len(find_weights(tmp_path / "weights.pt", shapes).state) == 1
    assert time.process_time() - began < 20


def test_a_picture_starts_no_program(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    ghostscript = tmp_path / "bin/gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    ghostscript.chmod(0o755)
    eps = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    (tmp_path / "eps.png").write_text(eps)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    done = launch("predict", str(run_dir), f"{tmp_path}/eps.png", cwd=tmp_path, PATH=path)
    assert "eps.png cannot be read: its format is unknown" in done.output
    assert not (tmp_path / "started").exists()


def test_pixels_of_an_unknown_range_are_refused(run_dir: Path, tmp_path: Path) -> None:
    Image.fromarray(np.linspace(0, 1, 144, dtype=np.float32).reshape(12, 12)).save(
        tmp_path / "float.tif"
    )
    done = launch("predict", str(run_dir), f"{tmp_path}/float.tif", cwd=tmp_path)
    assert "float.tif cannot be read: its pixels are floating-point numbers" in done.output


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_verify_reads_only_files_of_the_run(kind: str, run_dir: Path, tmp_path: Path) -> None:
    path = run_dir / f"checkpoints/step-{newest_step(run_dir):08d}.pt"
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    refused("verify", str(run_dir), cwd=tmp_path)
    refused("verify", str(run_dir), str(run_dir), cwd=tmp_path)
    if kind == "pipe":
        with pytest.raises(DamagedCheckpointError, match="is not a regular file"):
            read_state(path)


@pytest.mark.parametrize("kind", ["pipe", "device", "brackets"])
def test_doctor_reads_only_files_of_the_run(kind: str, run_dir: Path, tmp_path: Path) -> None:
    path = run_dir / "processes.json"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/full")  # it has no end, as /dev/zero
    else:
        path.write_text("[" * 100_000)
    expected = "no job of this user" if kind == "brackets" else str(path)
    assert refused("doctor", str(run_dir), cwd=tmp_path).startswith(f"error: {expected}")


def test_nested_brackets_in_the_records_are_a_damaged_line(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    with path.open("a") as file:
        file.write("[" * 100_000 + "\n")
    assert len(list(read_records_of(path))) == len(path.read_text().splitlines()) - 1


ODD_NUMBERS: dict[str, Callable[[State], Any]] = {
    "no config": lambda state: state.update(config={}),
    "a text": lambda state: state["config"].update(global_batch_size="x"),
    "zero": lambda state: state["config"].update(global_batch_size=0),
    "many samples": lambda state: state.update(train_samples=10**12),
    "many epochs": lambda state: state.update(epoch=10**9),
    "many steps and epochs": lambda state: state.update(epoch=10**12, step=10**12),
    "samples beyond the memory": lambda state: state.update(train_samples=2**32 - 1),
}


@pytest.mark.parametrize("name", ODD_NUMBERS)
def test_verify_names_odd_numbers_of_a_checkpoint(name: str, run_dir: Path, tmp_path: Path) -> None:
    spoil(run_dir, ODD_NUMBERS[name])
    done = launch("verify", str(run_dir), cwd=tmp_path, deadline=40)
    assert done.code == 1
    assert "Traceback" not in done.output
    assert "step-" in done.output


@pytest.mark.parametrize("change", ["garbage", "removed", "no tags"])
def test_runs_without_comparable_records_are_not_the_same(
    change: str, run_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run_dir, other)
    metrics = other / "metrics.jsonl"
    match change:
        case "garbage":
            metrics.write_text("garbage\n")
        case "removed":
            metrics.unlink()
        case _:
            metrics.write_text('{"time": 1, "step": 8}\n')
    for pair in ((run_dir, other), (other, run_dir)):
        done = launch("verify", *map(str, pair), cwd=tmp_path, deadline=40)
        assert done.code == 1, done.output
        assert "records      ok" not in done.output


@pytest.mark.parametrize("kind", ["folder", "missing"])
def test_a_best_checkpoint_that_is_no_file_is_not_named(
    kind: str, run_dir: Path, tmp_path: Path
) -> None:
    (run_dir / "checkpoints/best.pt").unlink()
    if kind == "folder":
        (run_dir / "checkpoints/best.pt").mkdir()
    words = (*resume(run_dir), "checkpoint.keep_best=false")
    line = succeed(*words, cwd=tmp_path).output.splitlines()[-1]
    newest = run_dir / "checkpoints/step-00000016.pt"
    assert line.startswith(f"the newest checkpoint: {newest}; next: python -m ddp_trainer evaluate")
    assert "has no best.pt: using the newest" in succeed("evaluate", str(run_dir)).output


@pytest.mark.parametrize("name", ["checkpoints", "stopped"])
def test_a_file_in_place_of_a_folder_is_refused_before_training(
    name: str, run_dir: Path, tmp_path: Path
) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").touch() if name == "checkpoints" else (run_dir / "stopped").mkdir()
    line = refused(*resume(run_dir), cwd=tmp_path)
    assert name in line or "must be a folder that can be written" in line


def test_checkpoints_that_cannot_be_written_are_found_before_training(
    run_dir: Path, tmp_path: Path
) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    with memory_disk(run_dir / "checkpoints", "ro"):
        line = refused(*resume(run_dir), cwd=tmp_path)
    assert "must be a folder that can be written: [Errno 30] Read-only file system" in line
    assert f"{run_dir}/checkpoints" in line


@pytest.mark.parametrize("text", ["[" * 200_000, '{"status": "finished", "eval/top1": "x"}'])
def test_a_damaged_summary_is_written_anew(text: str, run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "summary.json").write_text(text)
    succeed(*WORDS, f"output_dir={run_dir.parent}", "name=run", cwd=tmp_path)
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 8


def test_nested_brackets_are_refused_at_once(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "config.yaml").write_text("a: " + "[" * 20_000 + "]" * 20_000)
    assert "is not the config of a run" in refused(*resume(run_dir), cwd=tmp_path)
    succeed("report", str(run_dir), cwd=tmp_path, deadline=40)
    assert "config.yaml is damaged" in (run_dir / "report.html").read_text()


def test_a_picture_from_a_closed_stdin_is_one_error(run_dir: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ddp_trainer", "predict", str(run_dir), "-"]
    done = run_command(["bash", "-c", f"{shlex.join(words)} <&-"], cwd=tmp_path)
    assert "stdin is closed" in done.output
    assert "Traceback" not in done.output


@pytest.mark.fault("an output that is full, or that nobody reads", times=2)
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["evaluate RUN", "report RUN", "verify RUN", "train --help"])
def test_an_output_that_is_full_or_not_read_is_no_traceback(
    command: str, unbuffered: str, run_dir: Path, tmp_path: Path
) -> None:
    words = f"{sys.executable} -m ddp_trainer {command.replace('RUN', str(run_dir))}"
    script = f"{words} | true; echo ${{PIPESTATUS[0]}}; {words} >/dev/full; echo $?"
    done = run_command(["bash", "-c", script], cwd=tmp_path, PYTHONUNBUFFERED=unbuffered)
    reason = "error: the output cannot be written (No space left on device)"
    assert done.output.splitlines() == [str(128 + signal.SIGPIPE), reason, "1"]
