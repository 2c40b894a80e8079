"""The file of a report: what it has of the run directories, how large it is, and what it leaves
out.
"""

import errno
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from processes import clean_environment
from run_dirs import DIGITS, START, digit_png, png, write_evaluation, write_run

from ddp_trainer.commands.report import main
from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.tools.report.curves import differences, rows_allowed, shorten
from ddp_trainer.tools.report.evaluations import Evaluation, choose, thumbnail_shares
from ddp_trainer.tools.report.files import RunFiles
from ddp_trainer.tools.report.metrics import Launch, Table, read_metrics
from ddp_trainer.tools.report.page import write_report
from ddp_trainer.tools.report.runs import Run, compare, flatten

MB = 1_000_000


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def report_on(*run_dirs: Path) -> str:
    write_report(run_dirs, run_dirs[0] / "report.html")
    return (run_dirs[0] / "report.html").read_text()


def data_of(page: str) -> dict[str, Any]:
    [text] = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    return json.loads(text)


def sums(differences: list[int]) -> list[int]:
    return [sum(differences[: place + 1]) for place in range(len(differences))]


def append(run_dir: Path, *records: dict[str, Any]) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)


# --- the command ----------------------------------------------------------------------------------


def test_the_command_writes_the_file_without_torch_and_prints_its_path(
    run_dir: Path, without_torch: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "ddp_trainer", "report", str(run_dir)]
    done = subprocess.run(
        command, env=clean_environment(**without_torch), timeout=60, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    size = (run_dir / "report.html").stat().st_size
    assert done.stdout == f"{run_dir}/report.html ({size / 1e6:.2f} MB)\n"


def test_output_and_title_are_options(run_dir: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "lr=0.1")
    main(
        [
            f"{tmp_path}/./run",
            str(other),
            f"output={tmp_path}/compared.html",
            "title=LeNet <and> ResNet",
        ]
    )
    assert not (run_dir / "report.html").exists()
    page = (tmp_path / "compared.html").read_text()
    assert "<title>LeNet &lt;and&gt; ResNet</title>" in page
    assert [run["name"] for run in data_of(page)["runs"]] == ["run", "lr=0.1"]


def test_null_stands_for_the_default_of_an_option(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir.parent)
    main(["run", "output=null", "title=null"])
    assert "<title>Report on run</title>" in (run_dir / "report.html").read_text()
    assert not Path("null").exists()


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^$"):  # exit code 0
        main(["--help"])
    output = capsys.readouterr().out
    assert output.startswith("usage: ")
    assert "output=null" in output
    assert "title=null" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "report takes one or more run directories"),
        (
            ["nowhere"],
            "nowhere is not a run directory: it has neither config.yaml nor checkpoints/",
        ),
        (["run", "empty"], "empty is not a run directory"),
        (["run", "run"], "run is given twice"),
        (["run", "./run"], "run is given twice"),
        (["run", "foo=1"], "foo=1 is unknown: report has the options output, title"),
        (["run", "--foo"], "--foo is unknown"),
        (["run", "output="], "output= is empty"),
        (
            ["run", "output=nowhere/report.html"],
            "output=nowhere/report.html must be a file in a folder that can be",
        ),
        (
            ["run", "output=empty"],
            "output=empty must be a file in a folder that can be written: Is a directory",
        ),
    ],
)
def test_a_mistake_is_one_error(
    words: list[str],
    message: str,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (run_dir.parent / "empty").mkdir()
    before = sorted(run_dir.parent.rglob("*"))
    monkeypatch.chdir(run_dir.parent)
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"error: {message}")
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert sorted(run_dir.parent.rglob("*")) == before


def test_an_old_report_is_replaced_and_stays_if_the_new_one_fails(run_dir: Path) -> None:
    path = run_dir / "report.html"
    path.write_text("old")
    with pytest.raises(ConfigError):
        write_report([run_dir, run_dir / "missing"], path)
    assert path.read_text() == "old"
    write_report([run_dir], path)
    assert path.read_text().startswith("<!doctype html>")
    assert not list(run_dir.glob(".*"))


# --- the page -------------------------------------------------------------------------------------


def test_a_report_on_two_runs_has_at_most_a_megabyte_besides_its_pictures(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, steps=20_000, every=20) for name in ("one", "two")]
    for run in runs:
        write_evaluation(run, wrong=500)
    page = report_on(*runs)
    pictures = re.findall(r"data:image/png;base64,[\w+/=]+", page)
    assert len(pictures) == 4 + 400
    assert len(data_of(page)["runs"][0]["tables"][0]["steps"]) == 1000
    assert 200_000 < len(page.encode()) - sum(map(len, pictures)) < MB


def test_the_page_loads_nothing(run_dir: Path) -> None:
    write_evaluation(run_dir)
    page = report_on(run_dir)
    assert "default-src &#39;none&#39;; img-src data:; style-src &#39;sha256-" in page
    addresses = re.findall(
        r"""(?:src|href|srcset|action|data)\s*=\s*["']?([^"'\s>]*)""", page.partition("<script")[0]
    )
    assert len(addresses) > 5
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert "@import" not in page
    assert "url(" not in page.partition("<script")[0]


def test_values_of_the_page_are_those_of_the_files(run_dir: Path) -> None:
    [run] = data_of(report_on(run_dir))["runs"]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for tag in (
        "train/loss",
        "eval/top1",
        "throughput/images_per_second",
        "time/step_ms",
        "samples/count",
    ):
        rows = [record for record in records if tag in record]
        [table] = [table for table in run["tables"] if tag in table["columns"]]
        assert sums(table["steps"]) == [row["step"] for row in rows]
        assert [time / 100 for time in sums(table["times"])] == pytest.approx(
            [row["time"] - START for row in rows], abs=0.006
        )
        assert table["columns"][tag] == pytest.approx([row[tag] for row in rows], rel=1e-5)
    assert run["stepsPerEpoch"] == 100
    shown = {tag for table in run["tables"] for tag in table["columns"]}
    assert not {"samples/digest", "step", "time", "epoch", "time/other_fraction"} & shown


def table_rows(page: str, label: str) -> list[list[str]]:
    """Return the cells of the table in the region with an aria-label."""
    table = page.partition(f'aria-label="{label}"')[2].partition("</table>")[0]
    assert table
    rows = re.findall("<tr>(.*?)</tr>", table)
    return [
        [unescape(cell) for cell in re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows
    ]


def test_config_keys_that_differ_come_first(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", lr=0.05)
    two = write_run(tmp_path / "two", lr=0.1)
    with open(two / "config.yaml", "a") as file:
        file.write("new_key: [1, null, true, 'x']\n")
    page = report_on(one, two)
    assert table_rows(page, "Keys that differ") == [
        ["Key", "one", "two"],
        ["optimizer.lr", "0.05", "0.1"],
        ["name", "one", "two"],
        ["new_key", "—", "[1, null, true, x]"],
    ]
    everything = table_rows(page, "All keys of the config")
    assert len(everything) == 1 + 16
    assert ["data.mean", "[0.2872]", "[0.2872]"] in everything
    assert ["max_steps", "null", "null"] in everything
    assert "Keys that differ" not in report_on(one)


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / folder / "run") for folder in ("a/x", "b/x", "c")]
    names = [run["name"] for run in data_of(report_on(*runs))["runs"]]
    assert names == ["a/x/run", "b/x/run", "c/run"]


@pytest.mark.parametrize(
    "missing", ["metrics.jsonl", "versions.json", "summary.json", "pictures", "config.yaml"]
)
def test_a_part_without_data_names_the_command_that_writes_it(missing: str, run_dir: Path) -> None:
    (run_dir / "checkpoints").mkdir()
    path = run_dir / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    texts = re.findall('<p class="empty">(.*?)</p>', report_on(run_dir), re.DOTALL)
    assert any(missing in text and "python -m ddp_trainer train" in text for text in texts)
    assert any(f"python -m ddp_trainer evaluate {run_dir}" in text for text in texts)


# --- metrics --------------------------------------------------------------------------------------


def test_launches_have_world_sizes_and_the_time_since_the_last_record(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "run", launches=((0, 4), (300, 2), (700, 2))))
    assert [(launch.step, launch.world_size) for launch in run.metrics.launches] == [
        (0, 4),
        (300, 2),
        (700, 2),
    ]
    assert [round(launch.time - launch.gap_start) for launch in run.metrics.launches[1:]] == [
        600,
        600,
    ]
    assert run.world_sizes == "4 → 2"
    assert [row[0:3] + row[4:] for row in run.launch_rows()] == [
        ["1", "0", "4", ""],
        ["2", "300", "2", "10 min 0 s"],
        ["3", "700", "2", "10 min 0 s"],
    ]


def test_launches_of_older_versions_are_read_from_the_log(run_dir: Path) -> None:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    (run_dir / "metrics.jsonl").write_text("")
    append(run_dir, *(record for record in records if "launch/world_size" not in record))
    (run_dir / "train.log").write_text(
        "2026-11-23 04:31:48,915 INFO 4 × cpu (gloo), fp32, num_threads=1\n2026-11-23 04:31:48,915"
        " INFO global batch 256 = 4 ranks × 64, 50 steps an epoch, 3 epochs, lr 0.05\n2026-11-23"
        " 04:40:48,915 INFO 2 × NVIDIA H100 80GB HBM3 (nccl), bf16, num_threads=1\n2026-11-23"
        " 04:40:48,915 INFO resumed from outputs/x/checkpoints/step-00000300.pt (epoch 3, step"
        " 300)\n2026-11-23 04:40:48,915 INFO test acc 0.1042 · 0.1 s/epoch · 12,927 img/s on 1 ×"
        " cpu (gloo)\n"
    )
    metrics = read_metrics(RunFiles(run_dir))
    times = {record["step"]: record["time"] for record in records if "train/loss" in record}
    last = max(record["time"] for record in records if record["step"] == 300)
    assert (metrics.launches[0].step, metrics.launches[0].world_size) == (0, 4)
    assert metrics.launches[1] == Launch(300, 2, times[320], last)
    assert metrics.steps_per_epoch == 50


def test_a_run_without_evaluated_samples_has_no_scores(run_dir: Path) -> None:
    assert Run(run_dir).scores() == {"test top-1": "89.17 %", "best top-1": "90.01 %"}
    summary = json.loads((run_dir / "summary.json").read_text())
    none = {"eval/count": 0, "eval/top1": 0.0, "best_top1": 0.0}
    (run_dir / "summary.json").write_text(json.dumps(summary | none))
    assert Run(run_dir).scores() == {}


def test_a_loss_that_is_not_finite_is_named(run_dir: Path) -> None:
    append(run_dir, {"step": 1000, "eval/loss": "nan"})
    assert Run(run_dir).status == "finished"
    append(
        run_dir,
        {"step": 1040, "train/loss": "-inf", "train/top1": 0.1},
        {"step": 1060, "train/loss": "nan"},
    )
    run = Run(run_dir)
    assert (run.status, run.warnings) == (
        "diverged",
        ["The training diverged at step 1,040: train/loss is -inf."],
    )
    assert data_of(report_on(run_dir))["runs"][0]["nonfinite"]["step"] == 1040
    summary = json.loads((run_dir / "summary.json").read_text())
    # with on_nonfinite=skip
    (run_dir / "summary.json").write_text(json.dumps(summary | {"steps": 1060}))
    run = Run(run_dir)
    assert (run.status, run.warnings) == (
        "finished",
        ["A value was not finite at step 1,040: train/loss is -inf."],
    )


def test_the_summary_of_an_earlier_launch_is_not_the_result_of_a_resumed_run(run_dir: Path) -> None:
    append(run_dir, {"time": START + 900, "step": 1000, "launch/world_size": 2})
    run = Run(run_dir)
    assert (run.status, run.summary, len(run.warnings)) == ("not finished", {}, 1)
    assert run.warnings[0].startswith("The run was resumed after step 1,000, ")
    append(
        run_dir,
        {"step": 1020, "train/loss": 0.1},
        {"step": 1020, "eval/top1": 0.5, "eval/count": 355},
    )
    assert Run(run_dir).scores() == {"evaluation top-1": "50.00 %"}
    assert Run(run_dir).facts()["steps"] == "1,020"
    (run_dir / "summary.json").write_text(json.dumps({"status": "stopped", "steps": 1020}))
    assert (Run(run_dir).status, Run(run_dir).warnings) == ("stopped", [])


def test_a_launch_with_nothing_left_to_train_keeps_the_summary(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()  # with logger=[], train.log alone has launches
    with open(run_dir / "train.log", "a") as file:
        file.write(
            "x INFO 2 × cpu (gloo), fp32\nx INFO resumed from step-00001000.pt (epoch 10, step"
            " 1000)\n"
        )
    assert Run(run_dir).metrics.launches[-1].step == 1000
    assert Run(run_dir).status == "finished"


def test_a_divergence_of_the_last_launch_is_read_from_failure_log(run_dir: Path) -> None:
    (run_dir / "summary.json").unlink()
    (run_dir / "failure.log").write_text(
        "Traceback …\nx.DivergedError: the loss or gradient of step 12 is not finite (lr 0.1):"
        " lower optimizer.lr, …\n"
    )
    os.utime(run_dir / "failure.log", (START + 60, START + 60))
    assert Run(run_dir).warnings == [
        "The training diverged at step 12: the loss or gradient of step 12 is not finite (lr 0.1)."
    ]
    append(run_dir, {"time": START + 600, "step": 10, "launch/world_size": 2})
    assert Run(run_dir).status == "not finished"


def test_the_slowest_ranks_are_counted(run_dir: Path) -> None:
    windows = [
        {"step": 1000 + step, "straggler/rank": step % 2, "straggler/phase": "data"}
        for step in range(5)
    ]
    append(run_dir, *windows)
    rows = table_rows(report_on(run_dir), "Stragglers of run")
    assert rows[1:] == [["0", "data", "3", "60 %"], ["1", "data", "2", "40 %"]]


def test_more_values_than_a_page_can_have_are_shortened_and_the_page_says_so(
    tmp_path: Path,
) -> None:
    run_dir = write_run(tmp_path / "run", steps=20_000, every=1)
    page = report_on(run_dir)
    tables = data_of(page)["runs"][0]["tables"]
    count = sum(len(table["steps"]) * len(table["columns"]) for table in tables)
    assert 190_000 < count <= 200_000
    evaluations = next(table for table in tables if "eval/top1" in table["columns"])
    assert len(evaluations["steps"]) == 200
    assert "more than 200,000 values" in page
    assert "more than 200,000 values" not in report_on(write_run(tmp_path / "short"))


def test_shortened_columns_keep_their_extremes_in_order() -> None:
    numbers = random.Random(0)
    values = [numbers.uniform(-1, 1) if numbers.random() > 0.2 else math.nan for _ in range(1003)]
    table = Table(
        list(range(1003)),
        [float(step) for step in range(1003)],
        {"a": values, "time/other_ms": values},
    )
    short = shorten(table, rows=100)
    assert len(short.steps) == len(short.times) == len(short.columns["a"]) == 100
    assert (short.steps[0], short.steps[-1]) == (0, 1002)
    assert short.steps == sorted(short.steps)
    for place in range(0, 100, 2):
        start = short.steps[place]
        end = short.steps[place + 1]
        inside = [value for value in values[start : end + 1] if not math.isnan(value)]
        pair = short.columns["a"][place : place + 2]
        assert sorted(pair) == [min(inside), max(inside)]
        assert values.index(pair[0]) <= values.index(pair[1])
        assert short.columns["time/other_ms"][place] == pytest.approx(sum(inside) / len(inside))


@pytest.mark.parametrize(
    "sizes", [[(10, 3)], [(1000, 20), (10, 5)], [(500, 2), (500, 2), (3, 1)], [(10**5, 1)] * 3]
)
def test_the_longest_tables_are_shortened_as_little_as_possible(
    sizes: list[tuple[int, int]],
) -> None:
    tables = [
        Table([0] * rows, [], {str(tag): [] for tag in range(columns)}) for rows, columns in sizes
    ]
    rows = rows_allowed(tables, limit=900)

    def values(allowed: int) -> int:
        return sum(min(count, allowed) * columns for count, columns in sizes)

    if rows is None:
        assert values(10**9) <= 900
    else:
        assert values(rows) <= 900 < values(rows + 1)


def test_differences_add_up() -> None:
    assert sums(differences([5, 9, 9, 30])) == [5, 9, 9, 30]
    assert differences([]) == []


# --- evaluations ----------------------------------------------------------------------------------


def test_an_evaluation_of_the_page_is_that_of_the_files(run_dir: Path) -> None:
    folder = write_evaluation(run_dir)
    [evaluation] = data_of(report_on(run_dir))["evaluations"]
    metrics = json.loads((folder / "metrics.json").read_text())
    mistakes = json.loads((folder / "mistakes.json").read_text())
    lines = (folder / "confusion_matrix.csv").read_text().splitlines()
    assert evaluation["matrix"] == [
        [int(cell) for cell in line.split(",")[1:]] for line in lines[1:]
    ]
    assert (evaluation["run"], evaluation["folder"], evaluation["classes"]) == (
        0,
        "best-test",
        DIGITS,
    )
    assert [evaluation[key] for key in ("checkpoint", "split", "data", "step")] == [
        "best",
        "test",
        "digits",
        900,
    ]
    assert evaluation["top1"] == pytest.approx(metrics["top1"], rel=1e-5)
    assert [row[0] for row in evaluation["perClass"]] == list(range(10))
    assert [row[4] for row in evaluation["perClass"]] == [
        scores["support"] for scores in metrics["per_class"].values()
    ]
    assert evaluation["calibration"][0] == [None, None, 0]
    assert len(evaluation["calibration"]) == 15
    for row, entry in zip(evaluation["mistakes"], mistakes, strict=True):
        assert [row[0], DIGITS[row[1]], DIGITS[row[2]]] == [
            entry["path"],
            entry["label"],
            entry["prediction"],
        ]
        assert row[3:5] == pytest.approx([entry["probability"], entry["loss"]], rel=1e-5)
        assert row[5][:2] == [8, 8]


def test_classes_may_be_given_by_number(run_dir: Path) -> None:
    folder = write_evaluation(run_dir)
    (folder / "mistakes.json").write_text(
        json.dumps([{"id": 7, "label": 3, "prediction": 9, "loss": 2, "picture": None}])
    )
    [evaluation] = data_of(report_on(run_dir))["evaluations"]
    assert evaluation["mistakes"] == [["7", 3, 9, None, 2, None]]


@pytest.mark.parametrize(("classes", "has_matrix"), [(60, True), (61, False), (1000, False)])
def test_very_many_classes_have_the_most_confused_pairs(
    classes: int, has_matrix: bool, tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path / "run", steps=100)
    names = [f"class {number}" for number in range(classes)]
    folder = write_evaluation(run_dir, names=names, wrong=900, thumbnails=False)
    page = report_on(run_dir)
    [evaluation] = data_of(page)["evaluations"]
    assert bool(evaluation["matrix"]) == has_matrix
    entries = json.loads((folder / "mistakes.json").read_text())
    counts = Counter((entry["label"], entry["prediction"]) for entry in entries)
    shown = {(names[row], names[column]): count for row, column, count in evaluation["pairs"]}
    assert len(shown) == min(200, len(counts))
    assert all(counts[pair] == count for pair, count in shown.items())
    assert sorted(shown.values(), reverse=True) == sorted(counts.values(), reverse=True)[:200]
    assert len(page) < 0.6 * MB


def test_at_most_400_thumbnails_of_the_worst_mistakes_and_of_every_cell(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, steps=100) for name in ("one", "two")]
    folders = [
        write_evaluation(run, wrong=wrong) for run, wrong in zip(runs, (30, 900), strict=True)
    ]
    evaluations = data_of(report_on(*runs))["evaluations"]
    pictured = [[row for row in evaluation["mistakes"] if row[5]] for evaluation in evaluations]
    assert [len(rows) for rows in pictured] == [30, 370]
    entries = json.loads((folders[1] / "mistakes.json").read_text())
    cells = {(row[1], row[2]) for row in pictured[1]}
    assert cells == {
        (DIGITS.index(entry["label"]), DIGITS.index(entry["prediction"])) for entry in entries
    }
    assert {entry["path"] for entry in entries[:185]} <= {row[0] for row in pictured[1]}


def test_choose_and_shares_never_exceed_the_limit(run_dir: Path) -> None:
    folders = [
        write_evaluation(run_dir, folder=f"{number}-test", wrong=number * 20)
        for number in range(1, 6)
    ]
    evaluations = [Evaluation(RunFiles(folder)) for folder in folders]
    for limit in (0, 1, 7, 100, 250, 300, 1000):
        shares = list(thumbnail_shares(evaluations, limit=limit))
        assert sum(shares) == min(limit, 300)
        for evaluation, share in zip(evaluations, shares, strict=True):
            places = choose(evaluation.mistakes, share)
            assert len(places) == len(set(places)) == share


# --- files of strangers ---------------------------------------------------------------------------


def test_pictures_outside_of_the_folder_are_not_read(run_dir: Path) -> None:
    folder = write_evaluation(run_dir, wrong=1)
    secret = digit_png(99, side=33)
    (run_dir / "secret.png").write_bytes(secret)
    (folder / "mistakes" / "link.png").symlink_to(run_dir / "secret.png")
    (folder / "mistakes" / "loop.png").symlink_to(folder / "mistakes" / "loop.png")
    (folder / "outside").symlink_to(run_dir)
    (folder / "mistakes" / "folder.png").mkdir()
    os.mkfifo(folder / "mistakes" / "fifo.png")
    (folder / "mistakes" / "text.png").write_text("not a PNG")
    (folder / "mistakes" / "large.png").write_bytes(secret + bytes(300_000))
    (folder / "mistakes" / "wide.png").write_bytes(png([[0] * 600]))
    good = json.loads((folder / "mistakes.json").read_text())[0]
    names = [
        str(run_dir / "secret.png"),
        "../../secret.png",
        "mistakes/../../../secret.png",
        "mistakes/link.png",
        "outside/secret.png",
        "mistakes/loop.png",
        "mistakes/folder.png",
        "mistakes/fifo.png",
        "mistakes/text.png",
        "mistakes/large.png",
        "mistakes/wide.png",
        "mistakes/missing.png",
        "a\0b.png",
        "",
        ".",
        5,
        None,
        ["x"],
        "x" * 5000,
        str(folder / good["picture"]),
    ]
    (folder / "mistakes.json").write_text(
        json.dumps([good] + [good | {"picture": name} for name in names])
    )
    page = report_on(run_dir)
    [evaluation] = data_of(page)["evaluations"]
    assert len(evaluation["mistakes"]) == len(names) + 1
    assert [place for place, row in enumerate(evaluation["mistakes"]) if row[5]] == [0]
    assert "pictures of mistakes that cannot be used: " in page


def test_a_file_system_that_does_not_answer_is_an_error_and_a_forbidden_file_a_note(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int) -> None:
        def fail(path: Path, *_: object) -> None:
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr("ddp_trainer.tools.report.files.open", fail, raising=False)

    refuse(errno.EACCES)
    assert "summary.json cannot be read: Permission denied." in report_on(run_dir)
    refuse(errno.EIO)
    with pytest.raises(TransientError, match=r"config\.yaml cannot be read: Input/output error"):
        report_on(run_dir)


def test_evaluations_that_cannot_be_opened_are_named_on_the_page(run_dir: Path) -> None:
    folder = write_evaluation(run_dir)
    (folder / "metrics.json").unlink()
    # root may read a file without permissions, but not this one
    (folder / "metrics.json").symlink_to("metrics.json")
    page = report_on(run_dir)
    assert (
        "evaluation/best-test/metrics.json cannot be read: Too many levels of symbolic links."
        in page
    )
    shutil.rmtree(run_dir / "evaluation")
    (run_dir / "evaluation").touch()
    assert "<li>evaluation cannot be read: Not a directory.</li>" in report_on(run_dir)


def test_yaml_that_would_fill_the_memory_is_cut(run_dir: Path) -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join(f'*{before}' for _ in range(9))}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    dicts = "k0: &k0 {x: 1, y: 2}\n" + "".join(
        f"k{n}: &k{n} {{x: *k{n - 1}, y: *k{n - 1}}}\n" for n in range(1, 40)
    )
    (run_dir / "config.yaml").write_text(bomb + dicts + "self: &self {again: *self}\n")
    assert len(report_on(run_dir)) < 2 * MB
    assert len(Run(run_dir).config) <= 1000


def test_damaged_files_are_named_on_the_page(run_dir: Path) -> None:
    folder = write_evaluation(run_dir)
    for path in (
        run_dir / "config.yaml",
        run_dir / "summary.json",
        run_dir / "versions.json",
        folder / "metrics.json",
        folder / "mistakes.json",
        folder / "confusion_matrix.csv",
        run_dir / "pictures" / "first_batch.png",
    ):
        path.write_bytes(b"]\xff\x00{")
    with open(run_dir / "metrics.jsonl", "ab") as file:
        file.write(
            b'\xff\xfe{"step": 1}\n{"step": true}\n[]\n{"step": 5, "train/loss": 1e999, "x": {"y":'
            b" [}\n"
        )
    texts = re.findall("<li>(.*?)</li>", report_on(run_dir))
    assert sorted(texts) == sorted(
        [
            "config.yaml is damaged.",
            "summary.json is damaged.",
            "versions.json is damaged.",
            "metrics.jsonl has damaged lines, which were left out: 4.",
            "pictures/first_batch.png is not a PNG of at most 8192 pixels a side and was left out.",
            *(
                f"evaluation/best-test/{name} is damaged."
                for name in ("metrics.json", "mistakes.json", "confusion_matrix.csv")
            ),
        ]
    )


@pytest.mark.parametrize("value", ["!!bool x", "!!int ''", "!!float ''", "!!timestamp x"])
def test_a_config_that_yaml_cannot_convert_is_named_on_the_page(value: str, run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text(f"key: {value}\n")
    assert "<li>config.yaml is damaged.</li>" in report_on(run_dir)


def test_no_flipped_bit_and_no_cut_keeps_the_page_from_being_written(
    run_dir: Path, tmp_path: Path
) -> None:
    write_evaluation(run_dir, wrong=5)
    numbers = random.Random(0)
    files = [path.relative_to(run_dir) for path in sorted(run_dir.rglob("*")) if path.is_file()]
    for number in range(40):
        copy = shutil.copytree(run_dir, tmp_path / str(number))
        path = copy / numbers.choice(
            files if number % 2 else [file for file in files if file.suffix != ".png"]
        )
        data = bytearray(path.read_bytes())
        position = numbers.randrange(len(data))
        if number % 3:
            data[position] ^= 1 << numbers.randrange(8)
        path.write_bytes(data if number % 3 else data[:position])
        assert data_of(report_on(copy))["runs"]


def nested(depth: int) -> Any:
    value: Any = "end"
    for _ in range(depth):
        value = [value, {"x": value}] if depth < 12 else [value]
    return value


@pytest.mark.parametrize(
    "value", [None, True, 5, -1, 10**400, 1e308, "x" * 5000, [], {}, [[]], nested(9), nested(800)]
)
@pytest.mark.parametrize(
    "name", ["summary.json", "versions.json", "metrics.json", "mistakes.json", "metrics.jsonl"]
)
def test_values_of_other_types_have_a_page(name: str, value: Any, run_dir: Path) -> None:
    folder = write_evaluation(run_dir, wrong=2)
    if name == "metrics.jsonl":
        tags = (
            "time",
            "epoch",
            "train/loss",
            "launch/world_size",
            "straggler/rank",
            "straggler/phase",
            "",
        )
        append(run_dir, *({"step": 2000, tag: value} for tag in tags), {"step": value})
    else:
        path = folder / name if (folder / name).exists() else run_dir / name
        known = json.loads(path.read_text())
        changed = (
            [dict.fromkeys(entry, value) for entry in known]
            if isinstance(known, list)
            else dict.fromkeys(known, value)
        )
        path.write_text(json.dumps(changed))
    assert data_of(report_on(run_dir))["runs"]


def test_a_name_that_is_not_utf_8_has_a_page(tmp_path: Path) -> None:
    run_dir = write_run(Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff")))
    write_evaluation(run_dir).rename(os.fsdecode(os.fsencode(run_dir) + b"/evaluation/e\xff"))
    data = data_of(report_on(run_dir))
    assert [data["runs"][0]["name"], data["evaluations"][0]["folder"]] == ["r?", "e?"]


def test_compare_and_flatten_keep_the_order_of_keys() -> None:
    first = flatten({"b": {"x": 1, "y": {}}, "a": None})
    second = flatten({"a": None, "c": False})
    assert first == {"b.x": "1", "b.y": "{}", "a": "null"}
    differing, rows = compare([first, second])
    assert rows == [
        ["b.x", "1", "—"],
        ["b.y", "{}", "—"],
        ["a", "null", "null"],
        ["c", "—", "false"],
    ]
    assert differing == [rows[0], rows[1], rows[3]]
