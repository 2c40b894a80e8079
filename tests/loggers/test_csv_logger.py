"""``logger=csv``: a table that stays one through new tags, kills, damage and a full disk."""

import csv
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ddp_trainer.config.loggers import CsvConfig
from ddp_trainer.observers.loggers.csv_file import CsvLogger


def begin(run_dir: Path, step: int = 0) -> CsvLogger:
    """Return the logger of a launch that begins after `step`."""
    logger = CsvLogger(CsvConfig(), run_dir)
    logger.start(step)
    return logger


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.csv without ``time``, after checking that each has all columns and
    no others.
    """
    with open(run_dir / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, strict=True))
    assert not [row for row in rows if None in row or None in row.values()]
    return [{column: value for column, value in row.items() if column != "time"} for row in rows]


def test_a_new_tag_is_a_column_at_the_end(tmp_path: Path) -> None:
    logger = begin(tmp_path)
    logger.scalars({"epoch": 0, "b": 0.1, "a": 1e-30}, 1)
    logger.scalars({"epoch": 0, "a": 2}, 2)
    logger.scalars({"epoch": 1, "c": 5, "a": 3}, 3)
    assert read(tmp_path) == [
        {"step": "1", "epoch": "0", "b": "0.1", "a": "1e-30", "c": ""},
        {"step": "2", "epoch": "0", "b": "", "a": "2", "c": ""},
        {"step": "3", "epoch": "1", "b": "", "a": "3", "c": "5"},
    ]
    assert (tmp_path / "metrics.csv").read_text().startswith("time,step,epoch,b,a,c\n")


def test_texts_and_special_numbers_come_back(tmp_path: Path) -> None:
    texts = {"epoch": 0, "comma": 'a,"b"', "line": "a\nb\r\nc", "é": "ü", "empty": ""}
    begin(tmp_path).scalars({**texts, "nan": math.nan, "inf": -math.inf}, 1)
    logger = begin(tmp_path, 1)
    logger.scalars({"epoch": 0, "new": 1 / 3}, 2)
    [first, second] = read(tmp_path)
    assert {key: first[key] for key in texts} == {key: str(text) for key, text in texts.items()}
    assert math.isnan(float(first["nan"]))
    assert float(first["inf"]) == -math.inf
    assert float(second["new"]) == 1 / 3


def test_a_resume_drops_rows_past_its_step(tmp_path: Path) -> None:
    logger = begin(tmp_path)
    for step in (1, 2, 2, 3):
        logger.scalars({"epoch": 0, "a": step}, step)
    logger = begin(tmp_path, 2)
    logger.scalars({"epoch": 0, "a": 30}, 3)
    assert [(row["step"], row["a"]) for row in read(tmp_path)] == [
        ("1", "1"),
        ("2", "2"),
        ("2", "2"),
        ("3", "30"),
    ]


TAGS = {"epoch": 0, "loss": 0.123, "digest": 'a "quoted"\ntext'}


def test_a_file_that_was_cut_anywhere_loses_only_what_was_cut(tmp_path: Path) -> None:
    logger = begin(tmp_path)
    for step in (1, 2):
        logger.scalars(TAGS, step)
    whole = (tmp_path / "metrics.csv").read_bytes()
    rows = read(tmp_path)
    header = whole.index(b"\n") + 1
    for length in range(header, len(whole)):
        (tmp_path / "metrics.csv").write_bytes(whole[:length])
        begin(tmp_path, 9).scalars({**TAGS, "new": 1}, 10)
        *kept, last = read(tmp_path)
        assert kept == [{**row, "new": ""} for row in rows[: len(kept)]]
        assert whole[:length].count(b'\n"') <= len(kept) <= 2  # each row is two lines
        assert (last["step"], last["loss"], last["new"]) == ("10", "0.123", "1")


DAMAGE = {
    "a flipped bit": lambda data: data[:80] + bytes([data[80] ^ 16]) + data[81:],
    "no text": lambda data: data[:60] + b"\xff\x00\xfe" + data[63:],
    "a quotation mark": lambda data: data.replace(b"0.123", b'"0.123', 1),
    "a step that is no number": lambda data: data.replace(b",2,", b",two,", 1),
    "an endless step": lambda data: data.replace(b",2,", b"," + b"2" * 5000 + b",", 1),
    "another row": lambda data: data + b"a,b\n1,2,3,4,5,6,7\n\n",
    "as a spreadsheet saves it": lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"),
    "removed": lambda data: None,
}


@pytest.mark.parametrize("when", ["between launches", "in a launch"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_row_damages_no_later_one(damage: str, when: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    logger = begin(tmp_path)
    for step in range(1, 6):
        logger.scalars({"epoch": 0, "loss": 0.123}, step)
    changed = DAMAGE[damage](path.read_bytes())
    path.unlink() if changed is None else path.write_bytes(changed)
    if when == "between launches":
        logger = begin(tmp_path, 5)
    for step in (6, 7):
        logger.scalars({"epoch": 0, "loss": 0.5, "new": 1}, step)
    rows = read(tmp_path)
    assert [(row["step"], row["loss"], row["new"]) for row in rows[-2:]] == [
        ("6", "0.5", "1"),
        ("7", "0.5", "1"),
    ]
    # that one ends at the next quotation mark, or never
    if damage not in (
        "removed",
        "a quotation mark",
    ):
        assert len(rows) >= 6


@pytest.mark.parametrize(
    "header",
    [b"time;step;epoch;loss\n1;1;0;2\n", b"a,b\n1,2\n", b"\x00", b"step,step,time,epoch\n"],
)
def test_a_file_without_its_header_is_kept_under_another_name(
    header: bytes, tmp_path: Path
) -> None:
    (tmp_path / "metrics.csv").write_bytes(header)
    begin(tmp_path, 5).scalars({"epoch": 0, "loss": 0.5}, 6)
    assert read(tmp_path) == [{"step": "6", "epoch": "0", "loss": "0.5"}]
    assert (tmp_path / "metrics.csv.damaged").read_bytes() == header


def test_rows_that_a_full_disk_refused_are_written_later(small_disk: Path) -> None:
    logger = begin(small_disk)
    logger.scalars({"epoch": 0, "a": 1}, 1)
    before = (small_disk / "metrics.csv").read_bytes()
    ballast = small_disk / "ballast"
    with open(ballast, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    for step, values in ((2, {"a": 2}), (3, {"b": 3}), (4, {"a": 4})):
        with pytest.raises(OSError, match=re.compile("no space left", re.IGNORECASE)):
            logger.scalars({"epoch": 0, "text": "x" * 5000, **values}, step)
        assert (small_disk / "metrics.csv").read_bytes() == before
    ballast.unlink()
    logger.scalars({"epoch": 0}, 5)
    assert [(row["step"], row["a"], row["b"]) for row in read(small_disk)] == [
        ("1", "1", ""),
        ("2", "2", ""),
        ("3", "", "3"),
        ("4", "4", ""),
        ("5", "", ""),
    ]
