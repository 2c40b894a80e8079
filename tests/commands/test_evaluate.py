"""``evaluate``: the scores of the training at any number of ranks, and clear errors."""

import csv
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import memory_disk
from image_sets import write_fashion_mnist
from PIL import Image
from processes import launch, on_ranks, succeed
from runs import BATCHNORM, TINY, compose, newest_checkpoint, read_summary, train_all, train_on

from ddp_trainer.checkpoint.file import write_file
from ddp_trainer.commands import evaluate
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.data import DigitsConfig
from ddp_trainer.config.errors import USER_ERROR
from ddp_trainer.data.datasets.digits import build_digits
from ddp_trainer.tools.trained_model import override

LENET = ("model=lenet", "precision=fp32", "max_steps=20", "logger=[]")


def _evaluate(*commands: list[str]) -> None:
    for words in commands:
        evaluate.main(words)


def metrics_of(run_dir: Path, name: str) -> dict[str, Any]:
    return json.loads((run_dir / f"evaluation/{name}/metrics.json").read_text())


def write_digits(
    root: Path, *, splits: tuple[str, ...] = ("train", "val"), count: int = 200
) -> Path:
    """Write handwritten digits as a folder of images with a folder per class."""
    datasets = build_digits(DigitsConfig())
    for split in splits:
        images: Any = datasets.train if split == "train" else datasets.eval
        for number in range(count):
            folder = root / split / f"digit {int(images.labels[number])}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images.images[number, 0].numpy()).save(folder / f"{number}.png")
    return root


def words_for(data: str, folder: Path) -> tuple[str, ...]:
    """Return the overrides that choose a data set; its files are written."""
    if data == "digits":
        return ("data=digits",)
    if data == "fashion_mnist":
        return ("data=fashion_mnist", f"data.root={write_fashion_mnist(folder / 'idx')}")
    root = write_digits(folder / "images")
    return (
        "data=imagefolder",
        f"data.root={root}",
        "data.image_size=16",
        f"data.cache_dir={folder}",
        "global_batch_size=64",
    )


@pytest.fixture
def run_dir(digits_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(digits_run, tmp_path / "run")


def test_a_run_directory_that_cannot_be_written_is_read_with_another_output(
    tmp_path: Path,
) -> None:
    """The disk is read-only, as a disk of shared models may be."""
    with memory_disk(tmp_path / "disk", "size=32m") as disk:
        train_on(1, *TINY, f"output_dir={disk}", "name=run", "epochs=1", "logger=[]")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for command in ("evaluate", "export", "report"):
            words = [command, str(disk / "run"), *(["format=pt2"] if command == "export" else [])]
            done = launch(*words)
            assert done.code == USER_ERROR, done.output
            assert done.output.splitlines()[-1].startswith(f"error: {disk}/run/"), done.output
            assert done.output.endswith(
                " cannot be written: Read-only file system; set output=… to a path that can be "
                "written\n"
            )
            output = tmp_path / command
            assert f"{output}" in succeed(*words, f"output={output}").output
            assert launch(*words, "output=").code == USER_ERROR
    assert (tmp_path / "evaluate/best-test/metrics.json").exists()
    assert {path.name for path in (tmp_path / "export").iterdir()} == {
        ".lock",
        "model.pt2",
        "model_card.md",
    }
    assert (tmp_path / "report").read_text().startswith("<!doctype html>")


def test_a_folder_whose_name_is_not_utf_8_can_be_printed(digits_run: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(digits_run, os.fsdecode(os.fsencode(tmp_path) + b"/r\xff"))
    assert rf"wrote {tmp_path}/r\udcff/evaluation/best-test" in succeed("evaluate", run_dir).output
    assert rf"{tmp_path}/r\udcff/report.html (" in succeed("report", run_dir).output


def test_the_matrix_is_the_same_at_any_number_of_ranks_and_top1_that_of_the_training(
    tmp_path: Path,
) -> None:
    names = ("digits", "fashion_mnist", "imagefolder")
    train_all(
        2,
        [
            (*LENET, *words_for(name, tmp_path), f"output_dir={tmp_path}", f"name={name}")
            for name in names
        ],
    )
    matrices: dict[str, set[bytes]] = {name: set() for name in names}
    for ranks in (1, 2, 3):
        on_ranks(
            ranks,
            _evaluate,
            *([str(tmp_path / name), "checkpoint=last"] for name in names),
            deadline=120,
        )
        for name in names:
            summary = read_summary(tmp_path / name)
            split = "last-validation" if name == "imagefolder" else "last-test"
            metrics = metrics_of(tmp_path / name, split)
            assert metrics["top1"] == summary["eval/top1"]
            assert metrics["loss"] == pytest.approx(summary["eval/loss"], rel=1e-6)
            assert metrics["count"] == summary["eval/count"]
            matrices[name].add(
                (tmp_path / name / f"evaluation/{split}/confusion_matrix.csv").read_bytes()
            )
    for name, (matrix,) in matrices.items():
        rows = list(csv.reader(matrix.decode().splitlines()))[1:]
        correct = sum(int(row[number]) for number, row in enumerate(rows, 1))
        total = sum(int(cell) for row in rows for cell in row[1:])
        assert total == read_summary(tmp_path / name)["eval/count"]
        assert correct / total == pytest.approx(read_summary(tmp_path / name)["eval/top1"])


def test_a_checkpoint_may_be_the_best_the_last_or_that_of_a_step(run_dir: Path) -> None:
    steps = sorted(int(path.stem[5:]) for path in (run_dir / "checkpoints").glob("step-*.pt"))
    choices = {"last": steps[-1], str(steps[0]): steps[0]}
    commands = [[str(run_dir), f"checkpoint={checkpoint}"] for checkpoint in choices]
    on_ranks(1, _evaluate, [str(run_dir)], *commands)
    for checkpoint, step in choices.items():
        assert metrics_of(run_dir, f"{checkpoint}-test")["step"] == step
    assert metrics_of(run_dir, "best-test")["top1"] == newest_checkpoint(run_dir)["best_top1"]


def test_the_last_checkpoint_is_the_newest_good_one(run_dir: Path) -> None:
    newest, older = sorted((run_dir / "checkpoints").glob("step-*.pt"), reverse=True)[:2]
    newest.write_bytes(newest.read_bytes()[:-1])
    done = succeed("evaluate", str(run_dir), "checkpoint=last")
    assert "does not end with a checksum" in done.output
    assert metrics_of(run_dir, "last-test")["step"] == int(older.stem[5:])


def test_every_split_has_its_own_images(tmp_path: Path) -> None:
    train_on(
        1,
        *LENET,
        "data=digits",
        "data.validation_fraction=0.25",
        f"output_dir={tmp_path}",
        "name=run",
    )
    splits = ("test", "validation", "train")
    commands = [[str(tmp_path / "run"), "checkpoint=last", f"split={split}"] for split in splits]
    on_ranks(2, _evaluate, *commands)
    counts = {split: metrics_of(tmp_path / "run", f"last-{split}")["count"] for split in splits}
    whole = build_digits(DigitsConfig())
    assert counts["test"] == len(whole.eval)  # type: ignore[arg-type]
    assert counts["train"] + counts["validation"] == len(whole.train)  # type: ignore[arg-type]
    assert counts["validation"] == round(0.25 * len(whole.train))  # type: ignore[arg-type]
    on_ranks(1, evaluate.main, [str(tmp_path / "run"), "checkpoint=last"])
    summary = read_summary(tmp_path / "run")
    assert metrics_of(tmp_path / "run", "last-validation")["top1"] == summary["eval/top1"]


def test_another_folder_with_the_same_classes(tmp_path: Path) -> None:
    train_on(
        1,
        *LENET,
        *words_for("imagefolder", tmp_path),
        "data.on_bad_image=skip",
        f"output_dir={tmp_path}",
        "name=run",
    )
    other = write_digits(tmp_path / "other", splits=("",), count=60)
    next((other / "digit 3").iterdir()).write_bytes(b"no image")
    on_ranks(1, evaluate.main, [str(tmp_path / "run"), "checkpoint=last"])
    of_training = metrics_of(tmp_path / "run", "last-validation")
    on_ranks(2, evaluate.main, [str(tmp_path / "run"), f"data.root={other}", "checkpoint=last"])
    [folder] = (tmp_path / "run/evaluation").glob("last-test-*")
    assert re.fullmatch("last-test-[0-9a-f]{8}", folder.name)
    metrics = metrics_of(tmp_path / "run", folder.name)
    assert metrics["count"] == 59
    assert metrics["data"] == {"name": "imagefolder", "root": str(other)}
    assert metrics_of(tmp_path / "run", "last-validation") == of_training
    copy = shutil.copytree(tmp_path / "images", tmp_path / "copy")
    on_ranks(1, evaluate.main, [str(tmp_path / "run"), f"data.root={copy}", "checkpoint=last"])
    of_copy = metrics_of(tmp_path / "run", "last-validation")
    assert of_copy["data"]["root"] == str(copy)
    assert of_copy["top1"] == of_training["top1"]
    mistakes = json.loads((folder / "mistakes.json").read_text())
    assert mistakes
    assert all(
        os.path.dirname(mistake["path"]) == str(other / mistake["label"]) for mistake in mistakes
    )
    changed = next((tmp_path / "images/val/digit 1").iterdir())
    changed.rename(changed.with_stem("renamed"))
    done = succeed("evaluate", str(tmp_path / "run"), "checkpoint=last")
    assert done.output.count("the images differ from those of the training") == 1
    assert metrics_of(tmp_path / "run", "last-validation")["data"] == of_copy["data"]
    (other / "digit 3").rename(other / "cow")
    done = launch("evaluate", str(tmp_path / "run"), f"data.root={other}")
    assert done.code == 2
    assert (
        f"error: {other} has the class 'cow', which the training images do not have" in done.output
    )


@pytest.mark.parametrize("words", [(), ("data.validation_fraction=0.2",)])
def test_a_split_is_called_what_its_folder_is_called(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    images = write_digits(tmp_path / "images", splits=("test",), count=80)
    done = launch(
        "train",
        *LENET,
        *words_for("imagefolder", tmp_path),
        *words,
        f"output_dir={tmp_path}",
        "name=run",
    )
    assert done.code == 0, done.output
    ignored = f"{images / 'val'} is not used, because data.validation_fraction=0.2 holds out"
    assert done.output.count(ignored) == len(words)
    num_validation = 40 if words else 200
    assert f"{num_validation} validation images" in done.output
    assert "is chosen on the test split" not in done.output
    splits = [(), ("split=test",)]
    on_ranks(1, _evaluate, *[[str(tmp_path / "run"), "checkpoint=last", *each] for each in splits])
    counts = [
        metrics_of(tmp_path / "run", f"last-{name}")["count"] for name in ("validation", "test")
    ]
    assert counts == [num_validation, 80]
    shutil.rmtree(images / "test")
    done = launch("evaluate", str(tmp_path / "run"), "split=test")
    assert done.code == 2
    assert f"data.root={images} has no folder test: choose split=validation" in done.output


def test_statistics_and_averages_are_those_that_the_training_evaluated(tmp_path: Path) -> None:
    words = (
        *TINY,
        *BATCHNORM,
        "ema.decay=0.5",
        "max_steps=3",
        f"output_dir={tmp_path}",
        "name=run",
    )
    summary = train_on(2, *words)
    on_ranks(1, evaluate.main, [str(tmp_path / "run"), "checkpoint=last"])
    metrics = metrics_of(tmp_path / "run", "last-test")
    assert metrics["top1"] == summary["eval/top1"]
    assert metrics["loss"] == pytest.approx(summary["eval/loss"], rel=1e-5)


def test_a_checkpoint_of_another_format_or_a_missing_plugin_is_one_line(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sorted((run_dir / "checkpoints").glob("step-*.pt"))[-1]
    state = torch.load(path, weights_only=True)
    old = {
        key: value
        for key, value in state.items()
        if key not in ("preprocessing", "data_fingerprint")
    }
    unknown = state | {"config": state["config"] | {"model": {"name": "mine"}}}
    of_earlier = f"{path} was written by another version of ddp_trainer"
    renamed = state | {"config": state["config"] | {"num_microbatches": 1}}
    for content, expected in [
        (old, f"{of_earlier} and lacks the entries preprocessing, data_fingerprint"),
        (renamed, f"{of_earlier}, and this version cannot read its config"),
        (unknown, "model.name=mine is unknown here: install its plug-in"),
    ]:
        write_file(path, content)
        with pytest.raises(SystemExit, match=r"^2$"):
            evaluate.main([str(run_dir), "checkpoint=last"])
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {expected}")


def test_null_stands_for_the_default_of_a_path() -> None:
    config = to_builtins(compose("data=fashion_mnist", "data.root=x"))
    assert override(config, ["data.root=null"])["data"]["root"] is None
    assert override(config, ["data.root=[1"])["data"]["root"] == "[1"
