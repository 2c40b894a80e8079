"""data=manifest: a table of images, whatever program has written it."""

import csv
import json
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from processes import launch, succeed
from runs import read_summary, records, train_on
from torch import Tensor

from ddp_trainer.config.data import ImageFolderConfig, ManifestConfig
from ddp_trainer.config.errors import USER_ERROR, ConfigError
from ddp_trainer.data.build import build_datasets
from ddp_trainer.data.dataset import Datasets, Split, num_samples, per_sample, read_sample
from ddp_trainer.data.datasets import manifest
from ddp_trainer.data.datasets.tables import Table, read_table

HEADER = "path,label,split,group\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with train/<class> and val/<class> of three classes."""
    numbers = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 3)):
        for name in ("cat", "dog", "Ähre"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = numbers.integers(0, 256, (20, 24, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.png")
    return tmp_path


def rows_of(root: Path) -> list[dict[str, str]]:
    return [
        {
            "path": str(path.relative_to(root)),
            "label": path.parent.name,
            "split": path.parent.parent.name,
        }
        for path in sorted(root.glob("*/*/*.png"))
    ]


def write_csv(path: Path, rows: list[dict[str, Any]], *, delimiter: str = ",") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def build(file: Path, **options: Any) -> Datasets:
    cache_dir = str(file.parent / "cache")
    return build_datasets(
        ManifestConfig(file=str(file), image_size=16, cache_dir=cache_dir, **options)
    )


def groups_of(split: Split) -> Tensor:
    groups = per_sample(split, "groups")
    assert groups is not None
    return groups


def as_parquet(path: Path, rows: list[dict[str, str]]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


WRITERS: dict[str, Callable[[Path, list[dict[str, str]]], Any]] = {
    "a.csv": write_csv,
    "semicolons.CSV": lambda path, rows: write_csv(path, rows, delimiter=";"),
    "tabs.tsv": lambda path, rows: write_csv(path, rows, delimiter="\t"),
    "lines.jsonl": lambda path, rows: path.write_text("\n\n".join(map(json.dumps, rows))),
    "table.parquet": as_parquet,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_table_has_the_samples_of_the_folder_that_it_lists(name: str, root: Path) -> None:
    rows = rows_of(root)
    WRITERS[name](root / name, rows[::-1])
    data = build(root / name)
    cache_dir = str(root / "cache")
    folder = build_datasets(ImageFolderConfig(root=str(root), image_size=16, cache_dir=cache_dir))
    assert data.class_names == folder.class_names == ["cat", "dog", "Ähre"]
    assert data.eval_split == "validation"
    for split, other in ((data.train, folder.train), (data.eval, folder.eval)):
        assert num_samples(split) == num_samples(other)
        for index in range(num_samples(split)):
            (image, label), (expected, number) = (read_sample(s, index) for s in (split, other))
            assert torch.equal(image, expected)
            assert label == number


def test_what_spreadsheets_do_to_a_table_is_read(root: Path) -> None:
    rows = rows_of(root)
    write_csv(root / "a.csv", [{"note": 'a "b", c\nd', **row} for row in rows])
    text = (root / "a.csv").read_text()
    text = text.replace(",val\n", ", Validation \r\n").replace(",train\n", ",TRAIN\r\n\r\n")
    (root / "a.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    data = build(root / "a.csv")
    assert (num_samples(data.train), num_samples(data.eval)) == (24, 9)


def test_columns_classes_and_the_folder_can_be_chosen(root: Path) -> None:
    rows = [
        {"id": path.name, "what": "cat", "patient": f"p{number // 2}"}
        for number, path in enumerate(sorted((root / "train/cat").iterdir()))
    ]
    for row in rows[4:]:
        row["what"] = "lion"
    write_csv(root / "a.tsv", rows, delimiter="\t")
    data = build(
        root / "a.tsv",
        root=str(root / "train/cat"),
        path_column="id",
        label_column="what",
        group_column="patient",
        class_names=["lion", "cat"],
        validation_fraction=0.4,
    )
    assert data.class_names == ["lion", "cat"]
    groups = [set(groups_of(split).tolist()) for split in (data.train, data.eval)]
    assert groups[0] | groups[1] == {0, 1, 2, 3}
    assert not groups[0] & groups[1]


DAMAGED: dict[str, tuple[str, str]] = {
    "empty": ("", "is empty"),
    "header": (HEADER, "has no rows"),
    "no path column": ("file,label\na.png,x\n", "has no column 'path'"),
    "no label column": ("path,class\na.png,x\n", "set data.label_column to one of path, class"),
    "repeated column": ("path,label,label\na,b,c\n", "two columns 'label'"),
    "short row": (
        HEADER + "{0},cat,train,a\n{1},dog\n",
        "row 3 has 2 values, and the header has 4",
    ),
    "long row": (HEADER + "{0},cat,train,a,b\n", "row 2 has 5 values"),
    "open quote": (HEADER + '"{0},cat,train,a\n', "is no CSV"),
    "stray quote": (HEADER + '"{0}"x,cat,train,a\n', "is no CSV"),
    "no path": (HEADER + "  ,cat,train,a\n", "row 2 has no path"),
    "no label": (HEADER + "{0}, ,train,a\n", "row 2 has no label"),
    "no group": (HEADER + "{0},cat,train,\n", "row 2 has no group"),
    "no split": (HEADER + "{0},cat,,a\n", "row 2 has the split ''"),
    "other split": (HEADER + "{0},cat,dev,a\n", "must be one of train, training, val"),
    "missing file": (HEADER + "train/cat/none.png,cat,train,a\n", "row 2 lists train/cat/none.png"),
    "folder": (HEADER + "train/cat,cat,train,a\n", "row 2 lists train/cat"),
    "absolute path": (HEADER + "/none/a.png,cat,train,a\n", "row 2 lists /none/a.png"),
    "long path": (HEADER + "a" * 300 + ",cat,train,a\n", "File name too long"),
    "zero byte": (HEADER + "a\0b,cat,train,a\n", "row 2 "),
    "path twice": (HEADER + "{0},cat,train,a\n{0},dog,train,b\n", "row 3 lists {0}, as row 2 does"),
    "path twice in other words": (
        HEADER + "{0},cat,train,a\ntrain/./dog/../cat/0.png,dog,val,b\n",
        "row 3 lists train/./dog/../cat/0.png, as row 2 does",
    ),
    "a relative and a full path": (
        HEADER + "{0},cat,train,a\n/{root}/{0},dog,val,b\n",
        "row 3 lists /{root}/{0}, as row 2 does",
    ),
    "group twice": (HEADER + "{0},cat,train,a\n{1},dog,val,a\n", "row 3 puts the group 'a' into"),
    "one class": (HEADER + "{0},cat,train,a\n{1},cat,train,a\n", "has only one label"),
    "no training row": (HEADER + "{0},cat,val,a\n{1},dog,val,b\n", "no row of the split train"),
    "class without training": (
        HEADER + "{0},cat,train,a\n{1},dog,val,b\n",
        "no training image of the class 'dog'",
    ),
    "no evaluation": (HEADER + "{0},cat,train,a\n{1},dog,train,b\n", "validation_fraction=0.2"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_wrong_row_is_one_line_with_its_number(name: str, root: Path) -> None:
    text, message = DAMAGED[name]
    paths = ["train/cat/0.png", "train/dog/0.png"]
    (root / "a.csv").write_text(text.format(*paths, root=root))
    with pytest.raises(ConfigError) as caught:
        build(root / "a.csv")
    assert message.format(*paths, root=root) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(root / "a.csv") in str(caught.value)


def test_a_relative_root_has_the_images_of_full_paths(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    text = HEADER + f"cat/0.png,cat,train,a\n{root}/train/cat/0.png,cat,val,b\n"
    (root / "a.csv").write_text(text)
    with pytest.raises(ConfigError, match=r"row 3 lists .*/train/cat/0\.png, as row 2 does"):
        build(root / "a.csv", root="train")


def test_a_class_that_is_named_twice_is_refused(root: Path) -> None:
    table = write_csv(root / "a.csv", rows_of(root))
    with pytest.raises(ConfigError, match=r"^data\.class_names has the name 'cat' twice: remove"):
        build(table, class_names=["cat", "cat", "dog", "Ähre"])


OTHER_FILES = {
    "a.jsonl": (b'{"path": "x"', "row 1 is no JSON"),
    "list.jsonl": (b"[1]", "row 1 must be a JSON object"),
    "deep.jsonl": (b"[" * 100_000, "row 1 is no JSON"),
    "latin.csv": ("path,label\nä.png,x\n".encode("latin-1"), "is not UTF-8"),
    "b.parquet": (b"PAR1", "is no Parquet file"),
    "c.xlsx": (b"PK", "must end in .csv, .tsv, .jsonl, .parquet"),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_a_file_that_is_no_table_is_one_line(name: str, root: Path) -> None:
    content, message = OTHER_FILES[name]
    (root / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        build(root / name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_table_is_read_again_when_it_or_an_image_changes(root: Path) -> None:
    rows = rows_of(root)
    write_csv(root / "a.csv", rows)
    first = build(root / "a.csv").fingerprint
    assert build(root / "a.csv").fingerprint == first
    time.sleep(0.01)
    write_csv(root / "a.csv", rows[1:])
    assert build(root / "a.csv").fingerprint != first


def test_a_training_is_that_of_the_folder_and_is_evaluated_on_the_test_rows(root: Path) -> None:
    rows = rows_of(root)
    for row in rows[::4]:
        row["split"] = "test" if row["split"] == "val" else row["split"]
    write_csv(root / "a.csv", rows_of(root))
    write_csv(root / "b.csv", rows)
    common = (
        "model=lenet",
        "data.image_size=16",
        f"data.cache_dir={root}/cache",
        "global_batch_size=6",
        "epochs=2",
        "precision=fp32",
        "shards=6",
        f"output_dir={root}/runs",
    )
    train_on(1, *common, "data=imagefolder", f"data.root={root}", "name=folder")
    hashes = {read_summary(root / "runs/folder")["weights_sha256"]}
    digests = {str(records(root / "runs/folder", "samples/digest"))[-40:]}
    for size in (1, 2, 3):
        train_on(size, *common, "data=manifest", f"data.file={root}/a.csv", f"name={size}")
        hashes.add(read_summary(root / f"runs/{size}")["weights_sha256"])
        digests.add(str(records(root / f"runs/{size}", "samples/digest"))[-40:])
    assert len(hashes) == 1
    succeed("evaluate", f"{root}/runs/2", f"data.file={root}/b.csv", "split=test")
    found = list((root / "runs/2/evaluation").glob("*/metrics.json"))
    assert json.loads(found[0].read_text())["count"] == sum(row["split"] == "test" for row in rows)


def test_a_missing_table_is_one_error(tmp_path: Path) -> None:
    done = launch("data=manifest", "data.file=none.csv", f"output_dir={tmp_path}")
    assert done.code == USER_ERROR
    assert done.output.count("\n") == 1
    assert "data.file=none.csv must be a table of images" in done.output


def test_numbers_of_groups_and_splits_are_saved(root: Path) -> None:
    rows = [{**row, "group": row["path"]} for row in rows_of(root)]
    write_csv(root / "a.csv", rows)
    past = time.time() - 60
    os.utime(root / "a.csv", (past, past))
    first = build(root / "a.csv").train
    [saved] = (root / "cache").glob("*.index")
    with np.load(saved) as content:
        assert len(content["groups"]) == len(content["splits"]) == len(rows)
    again = build(root / "a.csv").train
    assert torch.equal(groups_of(first), groups_of(again))


def test_validation_rows_that_are_not_used_are_named(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = build(write_csv(root / "a.csv", rows_of(root)), validation_fraction=0.25)
    assert (num_samples(data.train), num_samples(data.eval)) == (18, 6)
    assert "the validation rows of" in caplog.text


def test_a_table_without_splits_has_no_test_split(root: Path) -> None:
    """Its rows are the images of the training, which are no test."""
    rows = [{name: row[name] for name in ("path", "label")} for row in rows_of(root)]
    table = write_csv(root / "a.csv", rows)
    common = (f"data.cache_dir={root}/cache", "data.image_size=16", f"output_dir={root}/runs")
    words = ("model=lenet", "data=manifest", f"data.file={table}", "data.validation_fraction=0.3")
    train_on(1, *words, *common, "global_batch_size=6", "epochs=1", "name=run")
    run_dir = f"{root}/runs/run"
    done = launch("evaluate", run_dir, "split=test")
    assert done.code == USER_ERROR, done.output
    assert "has no row of the split test" in done.output
    other = write_csv(root / "b.csv", rows[:5])
    succeed("evaluate", run_dir, f"data.file={other}", "split=test")


# --- tables that change, links, and odd values --------------------------------------------------


def first_label(data: Datasets) -> str:
    """Return the class of the first image of the class cat in the folder train."""
    whole: Any = data.train
    place = next(i for i in range(num_samples(whole)) if whole.path(i).endswith("train/cat/0.png"))
    return data.class_names[int(whole.labels[place])]


def relabelled(root: Path) -> list[dict[str, str]]:
    rows = rows_of(root)
    for row in rows:
        if row["path"] == "train/cat/0.png":
            row["label"] = "dog"
    return rows


def make_old(path: Path) -> None:
    past = time.time() - 60
    os.utime(path, (past, past))


def test_an_edited_table_is_noticed_beside_a_root_that_is_a_link(root: Path) -> None:
    """The parent of the linked folder has a table too, which must not be taken for it."""
    work = root / "work"
    work.mkdir()
    (work / "pictures").symlink_to(root / "train/cat/../..", target_is_directory=True)
    for path in (root.parent / "a.csv", work / "a.csv"):
        write_csv(path, rows_of(root))
        make_old(path)
    options: Any = {"root": str(work / "pictures")}
    assert first_label(build(work / "a.csv", **options)) == "cat"
    write_csv(work / "a.csv", relabelled(root))
    assert first_label(build(work / "a.csv", **options)) == "dog"


def test_a_table_that_is_replaced_while_it_is_read_is_read_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write_csv(root / "a.csv", rows_of(root))
    write_csv(root / "new.csv", relabelled(root))
    for path in (table, root / "new.csv"):
        make_old(path)
    os.utime(table, (1, 1))

    def read_and_replace(file: Path) -> Table:
        found = read_table(file)
        if (root / "new.csv").exists():
            (root / "new.csv").rename(table)
        return found

    monkeypatch.setattr(manifest, "read_table", read_and_replace)
    assert first_label(build(table)) == "cat"
    assert first_label(build(table)) == "dog"


@pytest.mark.parametrize("column", ["path", "label", "group"])
def test_half_of_a_character_is_an_error_of_its_row(column: str, root: Path) -> None:
    rows = [{"group": str(number), **row} for number, row in enumerate(rows_of(root))]
    rows[4][column] = "\ud800"
    (root / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match=rf"row 5 has the {column} .*, which is no Unicode text$"):
        build(root / "a.jsonl")


def test_columns_that_no_key_names_may_have_any_type(root: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = rows_of(root)
    table = pyarrow.Table.from_pylist(rows)
    count = range(len(rows))
    table = table.append_column("ns", pyarrow.array(count, pyarrow.timestamp("ns")))
    far = pyarrow.array([2**62] * len(rows), pyarrow.timestamp("us"))
    table = table.append_column("far", far)
    table = table.append_column("tz", pyarrow.array(count, pyarrow.timestamp("s", "Mars/Olympus")))
    table = table.append_column("lists", pyarrow.array([[1, 2]] * len(rows)))
    parquet.write_table(table, root / "a.parquet")
    assert num_samples(build(root / "a.parquet").train) == 24


def test_damaged_parquet_is_an_error_of_the_user(root: Path) -> None:
    """Changed bytes are not noticed, or are an error of the user, and never one to try again."""
    file = root / "a.parquet"
    as_parquet(file, rows_of(root) * 40)
    whole = file.read_bytes()
    chance = random.Random(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(4):
            damaged[chance.randrange(len(whole))] ^= chance.randrange(1, 256)
        file.write_bytes(damaged)
        with suppress(ConfigError):  # and no other exception
            read_table(file)
            continue
        refused += 1
    assert refused > 50


def test_a_table_with_many_columns_is_read_in_seconds(root: Path) -> None:
    rows = [{**row, **{f"c{n}": "" for n in range(60_000)}} for row in rows_of(root)[:3]]
    began = time.process_time()
    with pytest.raises(ConfigError):
        build(write_csv(root / "a.csv", rows))
    assert time.process_time() - began < 20


@pytest.mark.parametrize("file", ["~nobody_at_all/a.csv", f"{'a' * 300}.csv"])
def test_a_path_that_cannot_exist_is_one_error(file: str) -> None:
    with pytest.raises(ConfigError, match=r"^data\.file=.* must be a table of images"):
        build_datasets(ManifestConfig(file=file))
