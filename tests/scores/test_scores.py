"""Scores against their definitions, written down sample by sample; their files and pictures."""

import csv
import io
import json
import math
import os
import re
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from processes import forkserver, on_ranks, wait_for
from runs import in_process_group
from torch import Tensor

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.scores.files import replace_folder, write_evaluation
from ddp_trainer.scores.pictures import LEFT, TOP, captioned_png, confusion_png, thumbnail_png
from ddp_trainer.scores.scores import NUM_BINS, WORST, Scores
from ddp_trainer.tools.folder_reader import FolderReader
from ddp_trainer.tools.report.evaluations import EvaluationFolder
from ddp_trainer.tools.report.page import write_report
from ddp_trainer.training.evaluation import ID, SampleResults

CPU = torch.device("cpu")
NAMES = ["cat", "dog", 'ä,\n"b"', "bird", "cow", "ant", "never"]


def answers(count: int = 500, *, seed: int = 0, classes: int = len(NAMES)) -> tuple[Tensor, Tensor]:
    """Return logits [N, C] and labels [N], some negative; the last class is never used."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, classes, generator=generator)
    labels = torch.randint(classes - 1, (count,), generator=generator)
    logits[torch.arange(count), labels] += 1
    logits[:, -1] = -20
    labels[::50] = -100
    return logits, labels


def rows_of(
    logits: Tensor, labels: Tensor, *, batch: int = 64, rank: int = 0, world_size: int = 1
) -> SampleResults:
    results = SampleResults(CPU)
    for ids in torch.arange(len(labels))[rank::world_size].split(batch):
        results.add(logits[ids], labels[ids], ids)
    return results


def scores_of(logits: Tensor, labels: Tensor) -> Scores:
    return Scores(rows_of(logits, labels).rows(), NAMES)


def test_scores_are_those_of_their_definitions() -> None:
    logits, labels = answers()
    scores = scores_of(logits, labels)
    samples = [
        (label, row, [math.exp(value) / sum(map(math.exp, row)) for value in row])
        for label, row in zip(labels.tolist(), logits.tolist(), strict=True)
        if label >= 0
    ]
    predicted = [row.index(max(row)) for _, row, _ in samples]
    cells = Counter(
        (label, prediction) for (label, _, _), prediction in zip(samples, predicted, strict=True)
    )
    assert scores.count == len(samples) == 490
    assert {
        (r, c): n
        for r, line in enumerate(scores.confusion.tolist())
        for c, n in enumerate(line)
        if n
    } == cells
    assert scores.top1 == pytest.approx(sum(n for (r, c), n in cells.items() if r == c) / 490)
    top5 = sum(label in sorted(range(7), key=lambda c: -row[c])[:5] for label, row, _ in samples)
    assert scores.top5 == pytest.approx(top5 / 490)
    assert scores.loss == pytest.approx(
        -sum(math.log(shares[label]) for label, _, shares in samples) / 490, rel=1e-6
    )
    error = 0.0
    for number in range(NUM_BINS):
        chosen = [
            (max(shares), prediction == label)
            for (label, _, shares), prediction in zip(samples, predicted, strict=True)
            if number < max(shares) * NUM_BINS <= number + 1
        ]
        error += abs(sum(share for share, _ in chosen) - sum(right for _, right in chosen)) / 490
    assert scores.calibration_error() == pytest.approx(error, rel=1e-5)


def test_a_model_that_diverged_has_scores() -> None:
    scores = scores_of(torch.full((3, len(NAMES)), math.nan), torch.arange(3))
    assert [part["count"] for part in scores.calibration()] == [3, *[0] * (NUM_BINS - 1)]
    assert math.isnan(scores.calibration_error())


def test_classes_have_precision_recall_and_support() -> None:
    logits, labels = answers()
    scores = scores_of(logits, labels)
    predictions = logits.argmax(1)
    known = labels >= 0
    for number, (name, values) in enumerate(scores.per_class().items()):
        right = int(((predictions == number) & (labels == number)).sum())
        given = int(((predictions == number) & known).sum())
        own = int((labels == number).sum())
        assert name == NAMES[number]
        assert values["support"] == own
        assert values["precision"] == (right / given if given else None)
        assert values["recall"] == (right / own if own else None)
    assert scores.per_class()["never"] == {
        "precision": None,
        "recall": None,
        "f1": None,
        "support": 0,
    }


def test_mistakes_begin_with_the_worst_and_have_some_of_each_pair() -> None:
    logits, labels = answers(3000)
    scores = scores_of(logits, labels)
    mistakes = scores.mistakes()
    wrong = scores.rows[~scores.is_correct]
    assert len(wrong) > 2 * WORST
    assert mistakes[:WORST].equal(wrong[wrong[:, 3].argsort(descending=True)][:WORST])
    assert (mistakes[:-1, 3] >= mistakes[1:, 3]).all()
    pairs, listed = (Counter(map(tuple, part[:, 1:3].tolist())) for part in (wrong, mistakes))
    assert all(listed[pair] >= min(5, count) for pair, count in pairs.items())
    assert len({row[ID] for row in mistakes.tolist()}) == len(mistakes)


def _gathered(count: int) -> list[list[float]]:
    with in_process_group() as world:
        results = rows_of(*answers(count), batch=7, rank=world.rank, world_size=world.world_size)
        return results.gather(world).tolist()


@pytest.mark.parametrize("count", [2, 500])  # with two samples a rank has none
def test_rows_are_the_same_at_any_number_of_ranks(count: int) -> None:
    expected = rows_of(*answers(count)).rows().tolist()
    for world_size in (2, 3):
        assert on_ranks(world_size, _gathered, count) == [expected] * world_size


# --- files ----------------------------------------------------------------------------------------


def write(folder: Path, *, seed: int = 0, count: int = 500, names: list[str] = NAMES) -> Scores:
    scores = Scores(rows_of(*answers(count, seed=seed)).rows(), names)
    write_evaluation(
        folder,
        scores,
        {"split": "test"},
        paths=lambda number: f"p/{number}.png",
        read=lambda ids: torch.full((len(ids), 1, 8, 8), 7, dtype=torch.uint8),
    )
    return scores


def test_the_files_have_the_scores(tmp_path: Path) -> None:
    folder = tmp_path / "evaluation/best-test"
    scores = write(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "confusion_matrix.csv",
        "confusion_matrix.png",
        "metrics.json",
        "mistakes",
        "mistakes.json",
    ]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics == {"split": "test", **scores.values()}
    with open(folder / "confusion_matrix.csv", newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["", *NAMES]
    assert [line[0] for line in lines] == NAMES
    assert [[int(cell) for cell in line[1:]] for line in lines] == scores.confusion.tolist()
    mistakes = json.loads((folder / "mistakes.json").read_text())
    assert len(mistakes) == len(scores.mistakes())
    for mistake, row in zip(mistakes, scores.mistakes().tolist(), strict=True):
        assert mistake["path"] == f"p/{int(row[0])}.png"
        assert [mistake["label"], mistake["prediction"]] == [NAMES[int(row[1])], NAMES[int(row[2])]]
        assert read_png((folder / mistake["picture"]).read_bytes()).shape == (8, 8, 3)


def test_a_class_name_that_is_not_utf_8_is_the_same_in_all_files(tmp_path: Path) -> None:
    names = [os.fsdecode(b"caf\xe9"), *NAMES[1:]]
    write(tmp_path / "best-test", names=names)
    evaluation = EvaluationFolder(FolderReader(tmp_path / "best-test"))
    assert evaluation.class_names == names
    assert {name for name, _ in evaluation.class_scores()} == set(names)
    assert {mistake["label"] for mistake in evaluation.mistakes} == set(names[:-1])


def test_a_second_evaluation_replaces_all_files_of_the_first(tmp_path: Path) -> None:
    write(tmp_path / "best-test")
    second = write(tmp_path / "best-test", seed=1, count=60)
    pictures = {int(path.stem) for path in (tmp_path / "best-test/mistakes").iterdir()}
    assert pictures == set(second.mistakes()[:, 0].int().tolist())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "best-test"]


def test_files_that_the_user_has_added_stay(tmp_path: Path) -> None:
    folder = tmp_path / "best-test"
    write(folder)
    (folder / "notes.d/more").mkdir(parents=True)
    (folder / "notes.d/more/x.txt").write_text("mine")
    (folder / "notes.txt").write_text("mine")
    (folder / "nothing.txt").symlink_to("missing")
    before = (folder / "metrics.json").read_bytes()
    write(folder, seed=1, count=60)
    assert (folder / "metrics.json").read_bytes() != before
    assert (folder / "notes.d/more/x.txt").read_text() == "mine"
    assert (folder / "notes.txt").read_text() == "mine"
    assert os.readlink(folder / "nothing.txt") == "missing"


def _write_for_ever(folder: Path, started: Path) -> None:
    with replace_folder(folder) as new:
        (new / "metrics.json").write_text("half")
        started.write_text("")
        time.sleep(60)


def test_a_kill_while_files_are_written_leaves_the_old_ones(tmp_path: Path) -> None:
    write(tmp_path / "best-test")
    before = (tmp_path / "best-test/metrics.json").read_bytes()
    process = forkserver().Process(
        target=_write_for_ever, args=(tmp_path / "best-test", tmp_path / "started")
    )
    process.start()
    wait_for((tmp_path / "started").exists)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (tmp_path / "best-test/metrics.json").read_bytes() == before
    # as a kill between the two renames
    (tmp_path / "best-test").rename(tmp_path / ".best-test.old")
    with pytest.raises(RuntimeError), replace_folder(tmp_path / "best-test"):
        raise RuntimeError
    assert (tmp_path / "best-test/metrics.json").read_bytes() == before


def test_new_files_that_were_removed_leave_the_old_ones(tmp_path: Path) -> None:
    with replace_folder(tmp_path / "evaluation") as new:
        (new / "old.txt").touch()
    with (
        pytest.raises(ConfigError, match="evaluation cannot be written: No such file"),
        replace_folder(tmp_path / "evaluation") as new,
    ):
        shutil.rmtree(new)
    assert (tmp_path / "evaluation" / "old.txt").exists()


def test_a_folder_that_another_process_has_just_created_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "best-test"
    is_dir = Path.is_dir

    def is_dir_then_created(path: Path) -> bool:
        found = is_dir(path)
        if path == folder:
            folder.mkdir(exist_ok=True)
        return found

    monkeypatch.setattr(Path, "is_dir", is_dir_then_created)
    with replace_folder(folder) as new:
        (new / "metrics.json").touch()
    assert (folder / "metrics.json").exists()


def test_a_full_disk_is_one_line_and_the_old_files_stay(small_disk: Path) -> None:
    write(small_disk / "best-test", count=60)
    before = (small_disk / "best-test/metrics.json").read_bytes()
    with suppress(OSError):
        (small_disk / "ballast").write_bytes(bytes(4 * 2**20))
    with pytest.raises(
        (ConfigError, RuntimeError), match=r"best-test cannot be written: .*[Nn]o space"
    ):
        write(small_disk / "best-test", seed=1, count=5000)
    assert (small_disk / "best-test/metrics.json").read_bytes() == before
    assert not list(small_disk.glob(".best*"))


# --- pictures -------------------------------------------------------------------------------------


def read_png(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)


def test_the_matrix_is_blue_on_the_diagonal_and_orange_beside_it() -> None:
    confusion = torch.tensor([[10, 0, 0], [0, 0, 10], [0, 0, 0]])
    picture = read_png(confusion_png(confusion, ["a", "b", "c"]))
    cell = 64
    corners = {
        (r, c): tuple(picture[TOP + cell * r + 4, LEFT + cell * c + 4])
        for r in range(3)
        for c in range(3)
    }
    assert corners.pop((0, 0)) == (31, 119, 180)
    assert corners.pop((1, 2)) == (214, 96, 20)
    assert set(corners.values()) == {(255, 255, 255)}


def test_each_row_of_a_hundred_classes_has_a_name() -> None:
    names = [f"class {number}" for number in range(100)]
    picture = read_png(confusion_png(torch.eye(100, dtype=torch.int64), names))
    labels = picture[TOP : TOP + 1200, : LEFT - 4].min(axis=(1, 2)).reshape(100, 12)
    assert (labels.min(1) < 128).all()


@pytest.mark.parametrize("classes", [2, 30, 100, 1200])
def test_a_matrix_of_any_size_is_a_picture_of_a_page(classes: int) -> None:
    names = [f"名 {number} " + "x" * 40 for number in range(classes)]
    picture = read_png(confusion_png(torch.eye(classes, dtype=torch.int64), names))
    assert 300 < min(picture.shape[:2]) <= max(picture.shape[:2]) < 1500


def test_images_of_any_shape_have_captions_and_thumbnails() -> None:
    images = [torch.full((channels, 8, 12), 200, dtype=torch.uint8) for channels in (1, 3, 4)] * 4
    picture = read_png(captioned_png(images, [("dog\n", "is ä")] * len(images)))
    assert picture.shape[1] == 8 * 136
    assert tuple(picture[10, 10]) == (200, 200, 200)
    large = Image.open(io.BytesIO(thumbnail_png(torch.zeros(3, 300, 200, dtype=torch.uint8))))
    assert large.size == (64, 96)


def test_no_class_name_is_a_formula_and_the_report_has_no_control_character(
    tmp_path: Path,
) -> None:
    names = ["=1+1", "'@x", "\x1b[31mred", "-1", "+cmd|' /C calc'!A0", *NAMES[5:]]
    folder = tmp_path / "run/evaluation/best-test"
    write(folder, names=names)
    with open(folder / "confusion_matrix.csv", newline="") as file:
        header, *lines = csv.reader(file)
    assert header[1:] == [line[0] for line in lines]
    assert header[1:6] == ["'=1+1", "''@x", "\x1b[31mred", "-1", "'+cmd|' /C calc'!A0"]
    assert EvaluationFolder(FolderReader(folder)).class_names == names
    (tmp_path / "run/config.yaml").write_text("name: run\n")
    write_report([tmp_path / "run"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "\\x1b[31mred" in page
    assert re.findall("[^\n\t -~\xa0-\U0010ffff]", page) == []
