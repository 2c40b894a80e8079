"""Links that somebody else has planted: nothing outside of a run directory is ever written."""

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import end_with_descendants, launch, on_ranks, start_launch, succeed, wait_for
from runs import TINY, newest_step, world_of

from ddp_trainer.checkpoint.run_dir import exclude_node, lock_run_dir
from ddp_trainer.checkpoint.store import CheckpointStore
from ddp_trainer.config.errors import USER_ERROR, ConfigError, TransientError
from ddp_trainer.config.run_dirs import check_links
from ddp_trainer.config.schema import Resume
from ddp_trainer.files import lock_file, own_folder, replace_text
from ddp_trainer.output import output_file

SECRET = "a file of the user\n"
COMMANDS = ("train", "evaluate", "export", "verify")
NAMES = (
    "bad_images.jsonl",
    "checkpoints",
    "checkpoints/best.pt",
    "config.yaml",
    "evaluation",
    "evaluation/best-test",
    "export",
    "export/model_card.md",
    "failure.log",
    "images",
    "metrics.jsonl",
    "report.html",
    "stopped",
    "summary.json",
    "tensorboard",
    "train.log",
    "versions.json",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train, and return the run directory."""
    folder = tmp_path_factory.mktemp("finished")
    succeed(*TINY, f"output_dir={folder}", "name=run", cwd=folder)
    return folder / "run"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Return a folder with a file, both of which a link may lead to."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_text(SECRET)
    return folder


def words(command: str, run_dir: Path) -> list[str]:
    if command == "train":
        return [*TINY, f"output_dir={run_dir.parent}", f"name={run_dir.name}", "epochs=3"]
    return [command, str(run_dir)]


def plant_link(run_dir: Path, name: str, outside: Path) -> Path:
    """Replace a file or folder of `run_dir` by a link to `outside`; return the link."""
    link = run_dir / name
    link.parent.mkdir(exist_ok=True)
    is_folder = link.is_dir() or not link.suffix
    if link.is_dir():
        shutil.move(link, outside / "former")
    link.unlink(missing_ok=True)
    link.symlink_to(outside if is_folder else outside / "file")
    return link


@pytest.mark.parametrize("name", NAMES)
def test_a_link_out_of_the_run_directory_is_named(
    name: str, finished: Path, outside: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir, symlinks=True)
    check_links(run_dir)
    link = plant_link(run_dir, name, outside)
    with pytest.raises(ConfigError, match=f"^{link} is a link that leads out of the run directory"):
        check_links(run_dir)


@pytest.mark.parametrize("name", ["checkpoints", "evaluation/best-test", "metrics.jsonl"])
def test_each_command_refuses_a_link_out_of_the_run_directory(
    name: str, finished: Path, outside: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir, symlinks=True)
    link = plant_link(run_dir, name, outside)
    before = sorted(path.name for path in outside.rglob("*"))
    for command in COMMANDS:
        done = launch(*words(command, run_dir), cwd=tmp_path)
        assert done.code == USER_ERROR, done.output
        [line] = done.output.splitlines()
        assert line.startswith(f"error: {link} is a link that leads out of the run directory")
    launch("report", str(run_dir), cwd=tmp_path)  # writes one file, which replaces a link
    assert (outside / "file").read_text() == SECRET
    assert sorted(path.name for path in outside.rglob("*")) == before


def test_a_link_inside_of_the_run_directory_is_allowed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "tensorboard").mkdir(parents=True)
    (run_dir / "latest").symlink_to("tensorboard")
    (run_dir / "loop").symlink_to("loop")
    (run_dir / "wandb").mkdir()
    (run_dir / "wandb" / "debug.log").symlink_to(tmp_path)
    check_links(run_dir)
    (run_dir / "wandb" / "debug.log").unlink()
    (run_dir / "wandb").rmdir()
    (run_dir / "wandb").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="wandb is a link that leads out"):
        check_links(run_dir)


def test_a_file_is_never_written_through_a_link(outside: Path, tmp_path: Path) -> None:
    for name in ("x", ".x.writing"):
        (tmp_path / name).symlink_to(outside / "file")
    replace_text(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "new"
    assert not (tmp_path / "x").is_symlink()
    assert (outside / "file").read_text() == SECRET

    (tmp_path / "lock").symlink_to(outside / "file")
    (tmp_path / "dangling").symlink_to(outside / "new")
    for name in ("lock", "dangling"):
        lock = lock_file(tmp_path / name, seconds=0, holder="")
        with pytest.raises(OSError, match="symbolic links"), lock:
            pass
    assert (outside / "file").read_text() == SECRET
    assert not (outside / "new").exists()


def exchange(first: Path, second: Path) -> None:
    """Exchange two names at once: else the training could create one of them in between."""
    paths = os.fsencode(first), os.fsencode(second)
    at_fdcwd, rename_exchange = -100, 2
    assert ctypes.CDLL(None).renameat2(at_fdcwd, paths[0], at_fdcwd, paths[1], rename_exchange) == 0


@pytest.mark.fault("a link that takes the name of a file or folder in training", times=2)
def test_nothing_is_written_through_a_link_that_appears_in_training(
    outside: Path, tmp_path: Path
) -> None:
    """Checkpoints and records do not follow it, and the launch fails."""
    run_dir = tmp_path / "run"
    (outside / "step-00000001.pt").write_text(SECRET)
    (outside / ".x.writing").write_text(SECRET)
    before = sorted(path.name for path in outside.iterdir())
    words = [*TINY, "epochs=150", f"output_dir={tmp_path}", "name=run"]
    job = start_launch(["-m", "ddp_trainer", *words], ranks=None)
    try:
        wait_for(lambda: newest_step(run_dir) > 0)
        for name, target in (("checkpoints", outside), ("metrics.jsonl", outside / "file")):
            (tmp_path / name).symlink_to(target)
            exchange(tmp_path / name, run_dir / name)
        job.join(60)
    finally:
        end_with_descendants(job)
    assert job.exitcode == 1
    assert sorted(path.name for path in outside.iterdir()) == before
    assert all(path.read_text() == SECRET for path in outside.iterdir())
    assert "checkpoints is another folder now, by a link" in (run_dir / "train.log").read_text()


CALLS = {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.scandir"}
"""The audit events of calls that read or change folders."""


class Source:
    """Something with a state to save."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": 10, "epoch": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def save_with_a_link_at_each_call(folder: Path) -> int:
    """Save again and again; each time, the run becomes a link to another one at a later call.

    Returns the number of calls of a save.
    """
    root = folder
    number = calls = 0
    is_saving = False

    def count(event: str, _: Any) -> None:
        nonlocal calls
        if is_saving and event in CALLS:
            calls += 1
            if calls == number:
                exchange(root / "link", root / "run")

    sys.addaudithook(count)
    for number in range(1, 100):
        root = folder / str(number)
        for name in ("run", "other"):
            (root / name / "checkpoints").mkdir(parents=True)
            for step in range(1, 9):
                (root / name / f"checkpoints/step-{step:08d}.pt").write_text(SECRET)
        (root / "link").symlink_to(root / "other")
        options = {"keep_last": 2, "keep_best": True, "check_state": lambda state: None}
        store = CheckpointStore(root / "run/checkpoints", world=world_of(), **options)
        calls = 0
        is_saving = True
        store.save(Source(), is_best=True)
        store.wait()
        is_saving = False
        store.close()
        other = (root / "other/checkpoints").iterdir()
        assert [path.read_text() for path in other] == [SECRET] * 8, f"call {number} of {calls}"
        if calls < number:
            return calls
    raise AssertionError("a save has too many calls")


def test_a_save_stays_in_its_folder_whenever_a_link_takes_its_name(tmp_path: Path) -> None:
    [calls] = on_ranks(1, save_with_a_link_at_each_call, tmp_path)
    assert calls > 10


@pytest.mark.fault("a link that takes the name of the run directory in training")
def test_no_checkpoint_of_another_run_is_removed_if_the_directory_becomes_a_link_to_it(
    tmp_path: Path,
) -> None:
    other = tmp_path / "other/checkpoints"
    other.mkdir(parents=True)
    for step in range(1, 9):
        (other / f"step-{step:08d}.pt").write_text(SECRET)
    words = [*TINY, "epochs=150", f"output_dir={tmp_path}", "name=run"]
    job = start_launch(["-m", "ddp_trainer", *words], ranks=None)
    try:
        wait_for(lambda: newest_step(tmp_path / "run") > 0)
        (tmp_path / "moved").symlink_to(tmp_path / "other")
        exchange(tmp_path / "moved", tmp_path / "run")
        job.join(60)
    finally:
        end_with_descendants(job)
    assert job.exitcode == 1
    assert [path.read_text() for path in other.iterdir()] == [SECRET] * 8
    assert newest_step(tmp_path / "moved") > 0


@pytest.mark.parametrize("name", ["pictures", "flight", "profile"])
def test_own_folders_are_no_links(name: str, outside: Path, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(outside)
    with pytest.raises(NotADirectoryError), own_folder(tmp_path / name):
        pass


def link_away(run_dir: Path, target: Path, name: str) -> None:
    """Replace a file or folder of a run by a link, as soon as its config is written."""
    wait_for((run_dir / "config.yaml").exists)
    (run_dir / name).parent.mkdir(exist_ok=True)
    (run_dir / name).symlink_to(target)


@pytest.mark.fault("a link that takes the name of a file or folder in training")
@pytest.mark.parametrize("name", ["pictures/first_batch.png", "evaluation", "pictures"])
def test_pictures_and_scores_follow_no_link_that_appears_in_training(
    name: str, outside: Path, tmp_path: Path
) -> None:
    target = outside / "file" if name.endswith(".png") else outside
    before = sorted(path.name for path in outside.iterdir())
    words = [*TINY, "epochs=3", "report=true", f"output_dir={tmp_path}", "name=run"]
    job = start_launch(["-m", "ddp_trainer", *words, "logger=[jsonl,tensorboard]"], ranks=None)
    try:
        link_away(tmp_path / "run", target, name)
        job.join(60)
    finally:
        end_with_descendants(job)
    assert job.exitcode == 0
    assert sorted(path.name for path in outside.iterdir()) == before
    assert (outside / "file").read_text() == SECRET


def test_an_excluded_node_is_not_written_through_a_link(outside: Path, tmp_path: Path) -> None:
    path = tmp_path / "excluded_nodes"
    path.symlink_to(outside / "file")
    exclude_node(tmp_path, "node-1")
    path.unlink()
    path.hardlink_to(outside / "file")
    exclude_node(tmp_path, "node-1")
    assert (outside / "file").read_text() == SECRET
    path.unlink()
    for node in ("node-1", "node-2"):
        exclude_node(tmp_path, node)
    assert path.read_text() == "node-1\nnode-2\n"


def test_a_run_is_locked_under_each_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "latest").symlink_to("run")
    with (
        lock_run_dir(tmp_path / "run", {}, resume=Resume.auto),
        pytest.raises(TransientError, match="another launch is running in"),
        lock_run_dir(tmp_path / "latest", {}, resume=Resume.auto),
    ):
        pass


def test_a_link_to_an_open_file_is_not_replaced(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        link = tmp_path / "stdout"
        link.symlink_to(f"/proc/self/fd/{file.fileno()}")
        with pytest.raises(ConfigError, match="which is not replaced"), output_file(link):
            pass
        assert link.is_symlink()
