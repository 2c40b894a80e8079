"""The file of a report: its content, its size, and damaged input."""

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
import yaml
from processes import clean_environment
from run_dirs import DIGITS, START, digit_png, write_evaluation, write_run

from ddp_trainer.commands.report import main
from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.tools.folder_reader import FolderReader
from ddp_trainer.tools.report.charts import (
    HEIGHT,
    WIDTH,
    XAxis,
    build_charts,
    limits,
    shorten,
    spike_limit,
    ticks,
    to_path,
)
from ddp_trainer.tools.report.evaluations import EvaluationFolder
from ddp_trainer.tools.report.metrics import Metrics
from ddp_trainer.tools.report.page import write_report
from ddp_trainer.tools.report.runs import Run, flat_texts, rows_by_key
from ddp_trainer.tools.report.values import format_number

MB = 1_000_000


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def report_on(*run_dirs: Path) -> str:
    write_report(run_dirs, run_dirs[0] / "report.html")
    return (run_dirs[0] / "report.html").read_text()


def labels_of(page: str) -> list[str]:
    """Return the label of each run: the heading of its card, or of its row in the table of runs."""
    places = r'(?:<h2 id="run-\d+">|<th scope="row">)\s*<span class="run">.*?<bdi>(.*?)</bdi>'
    return [unescape(name) for name in re.findall(places, page, re.DOTALL)]


def evaluation_of(folder: Path) -> EvaluationFolder:
    return EvaluationFolder(FolderReader(folder))


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
    assert labels_of(page) == ["run", "lr=0.1"]  # their configs are equal but for the name


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
        (["run", "foo=1"], "foo=1 is not an option of report: --help lists them"),
        (["run", "--foo"], "--foo is not a run directory"),
        (["run", "output="], "output= is empty"),
        (
            ["run", "output=empty"],
            "empty is a folder, a device or a broken link, which is not replaced; set output=… to",
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
    path.write_text("<!doctype html>old")
    with pytest.raises(ConfigError):
        write_report([run_dir, run_dir / "missing"], path)
    assert path.read_text() == "<!doctype html>old"
    write_report([run_dir], path)
    assert path.read_text().endswith("</html>")
    assert not list(run_dir.glob(".*"))


# --- the page -------------------------------------------------------------------------------------


def test_a_report_on_two_runs_has_at_most_a_megabyte_besides_its_pictures(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, steps=20_000, every=20) for name in ("one", "two")]
    for run in runs:
        write_evaluation(run, wrong=500)
    page = report_on(*runs)
    pictures = re.findall(r"data:image/png;base64,[\w+/=]+", page)
    assert len(pictures) == 2 + 1000
    assert 200_000 < len(page.encode()) - sum(map(len, pictures)) < MB


def test_the_page_loads_nothing(run_dir: Path) -> None:
    write_evaluation(run_dir)
    page = report_on(run_dir)
    assert "default-src 'none'; img-src data:; style-src 'nonce-" in page
    addresses = re.findall(
        r"""(?:src|href|srcset|action|data)\s*=\s*["']?([^"'\s>]*)""", page.partition("<script")[0]
    )
    addresses = [unescape(address) for address in addresses]
    assert len(addresses) > 5
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert "@import" not in page
    assert "url(" not in page.partition("<script")[0]


def test_the_curves_are_those_of_the_records(run_dir: Path) -> None:
    metrics = Metrics(FolderReader(run_dir))
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for tag, curve in metrics.curves.items():
        rows = [record for record in records if tag in record]
        assert len(rows) > 5
        assert curve == [(row["step"], row[tag]) for row in rows]


def test_a_chart_has_a_line_for_each_run_and_the_places_of_resumes(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "one", launches=((0, 4), (300, 2))),
        write_run(tmp_path / "two", steps=500, seed=1),
    ]
    metrics = [Metrics(FolderReader(run)) for run in runs]
    x_axis = XAxis(metrics)
    charts = build_charts(metrics, x_axis)
    assert [chart.title for chart in charts] == [
        "Loss",
        "Top-1",
        "Learning rate",
        "Images per second",
    ]
    assert [(line.run, line.kind) for line in charts[0].lines] == [
        (0, "train"),
        (1, "train"),
        (0, "eval"),
        (1, "eval"),
    ]
    assert x_axis.name == "step"
    assert x_axis.changes == [(pytest.approx(0.3 * WIDTH), 0, 2)]
    loss = [value for _, value in metrics[0].curves["train/loss"]]
    assert charts[0].lines[0].last == f"{loss[-1]:.4g}"
    places = [
        tuple(map(float, point.split()))
        for point in re.findall(r"[\d.]+ [\d.]+", charts[0].lines[0].path)
    ]
    assert [x for x, _ in places] == pytest.approx(
        [WIDTH * step / 1000 for step in range(20, 1001, 20)], abs=0.06
    )
    highest = max(range(len(loss)), key=loss.__getitem__)
    assert min(range(len(places)), key=lambda place: places[place][1]) == highest


def test_the_x_axis_is_the_epoch_if_all_runs_know_their_steps_per_epoch(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("one", "two")]
    append(runs[0], {"step": 1000, "launch/world_size": 2, "launch/steps_per_epoch": 100})
    metrics = [Metrics(FolderReader(run)) for run in runs]
    assert XAxis(metrics).name == "step"
    x_axis = XAxis(metrics[:1])
    assert (x_axis.name, x_axis.ticks[-1]) == ("epoch", (pytest.approx(WIDTH), "10"))


def test_a_launch_that_never_trained_leaves_no_line_and_no_world_size(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    place = next(n for n, record in enumerate(records) if record["step"] == 520)
    launches = [
        {"time": START, "step": 500, "launch/world_size": size} for size in (8, 16, None, 3)
    ]
    records[place:place] = launches
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    append(run_dir, {"time": START, "step": 1000, "launch/world_size": 32})
    run = Run(run_dir)
    assert XAxis([run.metrics]).changes == [(WIDTH / 2, 0, 3)]
    assert run.world_sizes == "2 → 3"
    page = report_on(run_dir)
    assert (
        re.findall(r"resumed[^<]*", page.partition("<svg")[2]) == ["resumed with world size 3"] * 4
    )


DECAYS = {
    "exponential": [2.3 * math.exp(-step / 5) + 0.05 for step in range(1000)],
    "hyperbolic": [2.3 / step for step in range(1, 1000)],
    "at once": [2.3, 0.1, 0.11, 0.1, 0.09],
    "noisy": [2.3 * math.exp(-step / 300) * (1 + 0.4 * math.sin(step)) for step in range(1000)],
    "overfitted": [2.3 - 0.02 * step if step < 100 else 0.02 * step - 1.5 for step in range(200)],
    "negative": [-step / 10 for step in range(100)],
    "one": [2.3],
    "constant": [0.5, 0.5, 0.5],
}


@pytest.mark.parametrize("values", DECAYS.values(), ids=DECAYS)
def test_a_loss_without_spikes_is_wholly_visible(values: list[float]) -> None:
    low, high = limits([list(enumerate(values))])
    assert spike_limit([(0, "train/loss", list(enumerate(values)))], low, high) == high


@pytest.mark.parametrize("spikes", [{50: 1e6}, {0: 1e6}, {30: 40.0, 31: 50.0}, {98: 9, 99: 1e300}])
def test_spikes_of_a_loss_do_not_flatten_it_and_are_marked(
    spikes: dict[int, float], tmp_path: Path
) -> None:
    values = [2.3 * math.exp(-step / 30) + 0.1 for step in range(100)]
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("")
    append(run, *({"step": n, "train/loss": spikes.get(n, v)} for n, v in enumerate(values)))
    append(run, *({"step": step, "eval/loss": 0.6} for step in (33, 66)))
    metrics = [Metrics(FolderReader(run))]
    [chart] = build_charts(metrics, XAxis(metrics))
    train, evaluation = chart.lines
    heights = [float(y) for y in re.findall(r"[\d.]+ ([-\d.]+)", train.path)]
    assert min(heights) == 0  # at the upper edge
    ordinary = [height for step, height in enumerate(heights) if step not in spikes]
    assert max(ordinary) - min(ordinary) > HEIGHT / 2
    assert 1 <= train.marks.count("M") <= len(spikes)
    assert (evaluation.marks, evaluation.dots.count("M")) == ("", 2)
    assert chart.cut is not None
    assert chart.cut[1] == format_number(max(spikes.values()))
    assert f"values above {chart.cut[0]} are cut off" in report_on(run)


def test_a_run_that_diverges_does_not_flatten_the_others(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate("abc")]
    (runs[2] / "metrics.jsonl").write_text("")
    append(runs[2], *({"step": step, "train/loss": 1e4 * step} for step in range(1, 1000, 20)))
    metrics = [Metrics(FolderReader(run)) for run in runs]
    chart = build_charts(metrics, XAxis(metrics))[0]
    assert chart.cut is not None
    assert 2 < float(chart.cut[0]) < 4
    assert [bool(line.marks) for line in chart.lines] == [False, False, True, False, False]


def test_a_value_that_is_not_finite_is_a_gap_of_its_curve() -> None:
    curve = [(1, 0.0), (2, 1.0), (3, math.nan), (4, 1.0)]
    assert to_path(curve, x_unit=10.0, low=0.0, high=1.0) == "M10.0 170.0h0L20.0 0.0M40.0 0.0h0"


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-3.0, 1234.5), (1e-7, 2e-7), (0.1, 0.1001), (-1e300, 1e300)]
)
def test_ticks_are_round_and_inside_the_axis(low: float, high: float) -> None:
    places = ticks(low, high)
    assert 2 <= len(places) <= 6
    slack = 1e-9 * (high - low)
    assert low - slack <= places[0] < places[-1] <= high + slack
    size = places[1] - places[0]
    assert float(f"{size:.0e}") == pytest.approx(size)


@pytest.mark.parametrize("values", [[], [5.0], [0.0, 0.0], [math.nan], [1e300, -1e300], [1e-320]])
def test_limits_are_apart(values: list[float]) -> None:
    low, high = limits([list(enumerate(values))])
    assert low < high
    assert ticks(low, high)


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
        ["Key", "optimizer.lr=0.05", "optimizer.lr=0.1"],
        ["optimizer.lr", "0.05", "0.1"],
        ["name", "one", "two"],
        ["new_key", "—", "[1, None, True, 'x']"],
    ]
    everything = table_rows(page, "All keys of the config")
    assert len(everything) == 1 + 16
    assert ["data.mean", "[0.2872]", "[0.2872]"] in everything
    assert ["max_steps", "null", "null"] in everything
    assert "Keys that differ" not in report_on(one)


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / folder / "run") for folder in ("a/x", "b/x", "c")]
    assert labels_of(report_on(*runs)) == [str(run.resolve()) for run in runs]


def change_config(run_dir: Path, **values: Any) -> None:
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config | values, sort_keys=False))


def test_runs_are_labelled_by_the_keys_that_name_what_they_train(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=0.1, seed=1)]
    for run, device in zip(runs, ("cpu", "cuda"), strict=True):
        change_config(run, device=device, output_dir=str(run.parent), num_threads=len(device))
        change_config(run, report=device == "cpu", check={"every_steps": len(device)})
    change_config(runs[1], model={"name": "lenet"})
    page = report_on(*runs)
    labels = ["model=resnet18, optimizer.lr=0.05, seed=0", "model=lenet, optimizer.lr=0.1, seed=1"]
    assert labels_of(page) == labels
    assert table_rows(page, "Versions")[0] == ["Package", *labels]
    legend = page.partition('<ul class="legend">')[2].partition("</ul>")[0]
    assert re.findall("<bdi>(.*?)</bdi>", legend) == labels
    change_config(runs[1], model={"name": "resnet18"}, optimizer={"lr": 0.05}, seed=0)
    assert labels_of(report_on(*runs)) == ["a", "b"]


def test_runs_of_one_label_also_have_the_names_of_their_folders(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 1), ("c", 1))]
    runs.append(write_run(tmp_path / "without_config"))
    (runs[3] / "config.yaml").unlink()
    (runs[3] / "checkpoints").mkdir()
    assert labels_of(report_on(*runs)) == ["seed=0", "seed=1 (b)", "seed=1 (c)", "without_config"]


def test_several_runs_have_a_table_and_one_has_a_card(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", launches=((0, 4), (500, 2))),
        write_run(tmp_path / "b", lr=0.1),
    ]
    (runs[1] / "summary.json").unlink()
    (runs[1] / "versions.json").write_text("]")
    page = report_on(*runs)
    assert 'class="card" aria-labelledby' not in page
    head, first, second = [
        [re.sub("<.*?>", "", cell).strip() for cell in row] for row in table_rows(page, "Runs")
    ]
    first_row = dict(zip(head, first, strict=True))
    assert first_row["Run"] == "optimizer.lr=0.05"
    assert (first_row["Status"], first_row["Ranks"]) == ("finished", "4 → 2")
    assert (first_row["Best top-1"], first_row["Last top-1"]) == ("90.01 %", "89.17 %")
    assert (first_row["Steps"], first_row["Duration"]) == ("1,000", "1:02:06")
    assert dict(zip(head, second, strict=True)) == {
        **dict.fromkeys(head, "—"),
        "Run": "optimizer.lr=0.1",
        "Status": "not finished",
        "Steps": "1,000",
        "Ranks": "2",
    }
    assert "<li>versions.json is damaged.</li>" in page
    assert "There is no summary.json that can be read" in page
    page = report_on(runs[0])
    assert 'class="card" aria-labelledby' in page
    assert 'aria-label="Runs"' not in page


def test_a_folder_of_runs_stands_for_these_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lr in (0.3, 0.1, 0.2):
        write_run(tmp_path / f"sweep/optimizer.lr={lr}", lr=lr)
    (tmp_path / "sweep/multirun").mkdir()
    other = write_run(tmp_path / "other", lr=0.4)
    monkeypatch.chdir(tmp_path)
    main(["sweep", str(other)])
    page = (tmp_path / "sweep/report.html").read_text()
    assert labels_of(page) == [f"optimizer.lr={lr}" for lr in (0.1, 0.2, 0.3, 0.4)]
    assert "<title>Report on 4 runs</title>" in page
    assert not (other / "report.html").exists()


# --- numbers --------------------------------------------------------------------------------------


def test_no_number_has_more_digits_than_anyone_reads(tmp_path: Path) -> None:
    """A config's values stay as they were written; what is measured is rounded."""
    runs = [write_run(tmp_path / "a", lr=0.1), write_run(tmp_path / "b", lr=0.012345678901234567)]
    for run in runs:
        write_evaluation(run)
        summary = json.loads((run / "summary.json").read_text())
        summary |= {"eval/loss": 1 / 3, "rank_own_ms": [1e5 / 7, 2e-5 / 7]}
        (run / "summary.json").write_text(json.dumps(summary))
    page = report_on(*runs)
    shown = re.sub(r"data:image/png;base64,[\w+/=]+|nonce[=-]\S+", "", page)
    assert re.findall(r"\d[\d.]{13,}", shown) == []
    assert labels_of(page) == ["optimizer.lr=0.1", "optimizer.lr=0.0123457"]
    rows = dict(row[:2] for row in table_rows(page, "Summary"))
    assert rows["rank own ms"] == "[14285.7, 2.85714e-06]"
    assert rows["evaluation loss"] == "0.333333"
    assert "mfu" not in rows  # null in all runs


# --- bad images -----------------------------------------------------------------------------------


def test_bad_images_are_counted_and_the_first_are_listed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert "bad image" not in report_on(run).lower()
    folder = write_evaluation(run).parent
    entries = [{"path": f"<b>{n:03d}.png", "reason": "no image & no <i>"} for n in range(1234)]
    lines = [json.dumps(entry) for entry in entries]
    (run / "bad_images.jsonl").write_text("\n".join([*lines, "[]", '{"path": 5}']))
    (folder / "bad_images.jsonl").write_text(json.dumps(entries[0]))
    page = report_on(run)
    texts = " ".join(re.sub("<.*?>", "", page).split())
    assert "1,234 bad images left out, listed in bad_images.jsonl." in texts
    assert "1 bad image left out, listed in evaluation/bad_images.jsonl." in texts
    assert "bad_images.jsonl has damaged lines, which were left out: 2." in texts
    rows = table_rows(page, "Bad images of run")
    assert rows[:2] == [["Image", "Reason"], ["<b>000.png", "no image & no <i>"]]
    assert len(rows) == 1 + 50
    assert "<b>000" not in page


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


def test_the_card_names_the_world_sizes_of_the_launches(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "run", launches=((0, 4), (300, 2), (700, 2))))
    assert list(run.metrics.launches) == [(0, 4), (300, 2), (700, 2)]
    assert run.world_sizes == "4 → 2"


def test_a_rank_that_is_lost_changes_the_world_size_within_a_launch(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if "train/loss" in record:
            record["recovery/world_size"] = 1 if 500 <= record["step"] < 800 else 2
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    run = Run(run_dir)
    assert run.world_sizes == "2 → 1 → 2"
    assert XAxis([run.metrics]).changes == [(WIDTH / 2, 0, 1), (WIDTH * 0.8, 0, 2)]


def test_a_run_without_evaluated_samples_has_no_scores(run_dir: Path) -> None:
    assert Run(run_dir).scores() == {"test top-1": "89.17 %", "best top-1": "90.01 %"}
    summary = json.loads((run_dir / "summary.json").read_text())
    none = {"eval/count": 0, "eval/top1": 0.0, "best_top1": 0.0}
    (run_dir / "summary.json").write_text(json.dumps(summary | none))
    assert Run(run_dir).scores() == {}


def test_a_run_whose_last_loss_is_not_finite_has_diverged(run_dir: Path) -> None:
    append(run_dir, {"step": 1000, "eval/loss": "nan"})
    assert Run(run_dir).status == "finished"
    append(
        run_dir,
        {"step": 1040, "train/loss": "-inf", "train/top1": 0.1},
        {"step": 1060, "train/loss": "nan"},
    )
    run = Run(run_dir)
    assert (run.status, run.outcome) == ("diverged", "bad")
    assert "The training diverged at step 1,040: its loss is not finite." in report_on(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    # with on_nonfinite=skip
    (run_dir / "summary.json").write_text(json.dumps(summary | {"steps": 1060}))
    assert Run(run_dir).status == "finished"
    append(run_dir, {"step": 1080, "train/loss": 0.1})
    assert Run(run_dir).status == "not finished"


def test_the_summary_of_an_earlier_launch_is_not_the_result_of_a_resumed_run(run_dir: Path) -> None:
    append(run_dir, {"time": START + 900, "step": 1000, "launch/world_size": 2})
    run = Run(run_dir)
    assert (run.status, run.summary, run.outcome) == ("not finished", {}, "open")
    assert "The run was resumed after the launch that wrote summary.json" in report_on(run_dir)
    append(
        run_dir,
        {"step": 1020, "train/loss": 0.1},
        {"step": 1020, "eval/top1": 0.5, "eval/count": 355},
    )
    assert Run(run_dir).scores() == {}
    assert "<dd>1,020</dd>" in report_on(run_dir)
    (run_dir / "summary.json").write_text(json.dumps({"status": "stopped", "steps": 1020}))
    assert Run(run_dir).status == "stopped"


def test_a_long_curve_keeps_the_extremes_of_its_intervals_in_order() -> None:
    numbers = random.Random(0)
    values = [numbers.uniform(-1, 1) if numbers.random() > 0.2 else math.nan for _ in range(6400)]
    short = shorten(list(enumerate(values)))
    assert len(short) == 2 * WIDTH
    assert short == sorted(short)
    for place in range(0, len(short), 2):
        inside = [value for value in values[10 * place : 10 * place + 20] if not math.isnan(value)]
        assert sorted(value for _, value in short[place : place + 2]) == [min(inside), max(inside)]


# --- evaluations ----------------------------------------------------------------------------------


def test_an_evaluation_of_a_former_best_checkpoint_is_marked(run_dir: Path) -> None:
    file = write_evaluation(run_dir) / "metrics.json"
    metrics = json.loads(file.read_text())
    append(
        run_dir,
        {"step": 1100, "eval/top1": 0.99},
        {"step": 1150, "eval/top1": 0.995},  # in the middle of an epoch
        {"step": 1150, "launch/world_size": 2, "launch/steps_per_epoch": 100},
        {"step": 1200, "eval/top1": 0.99},
        {"step": 1300, "eval/top1": math.nan},
    )
    for step, checkpoint, is_old in ((900, "best", True), (1100, "best", False), (900, 900, False)):
        file.write_text(json.dumps(metrics | {"step": step, "checkpoint": checkpoint}))
        page = " ".join(report_on(run_dir).split())
        assert ("best.pt is now of step 1,100" in page) == is_old


def test_an_evaluation_has_the_values_of_its_files(run_dir: Path) -> None:
    folder = write_evaluation(run_dir)
    evaluation = evaluation_of(folder)
    metrics = json.loads((folder / "metrics.json").read_text())
    entries = json.loads((folder / "mistakes.json").read_text())
    lines = (folder / "confusion_matrix.csv").read_text().splitlines()
    assert [list(row) for row in evaluation.matrix] == [
        [int(cell) for cell in line.split(",")[1:]] for line in lines[1:]
    ]
    assert (evaluation.name, evaluation.class_names) == ("best-test", DIGITS)
    assert dict(evaluation.class_scores()) == metrics["per_class"]
    f1 = [scores["f1"] for _, scores in evaluation.class_scores()]
    assert f1 == sorted(f1)
    assert evaluation.calibration()[0] == [0.0, 0.0, 0.0]
    assert len(evaluation.calibration()) == 15
    for mistake, entry in zip(evaluation.mistakes, entries, strict=True):
        for key in ("path", "label", "prediction", "probability", "loss"):
            assert mistake[key] == entry[key]
        assert mistake["picture"].startswith("data:image/png;base64,")


@pytest.mark.parametrize(("classes", "has_matrix"), [(60, True), (61, False), (1000, False)])
def test_very_many_classes_have_the_most_confused_pairs(
    classes: int, has_matrix: bool, tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path / "run", steps=100)
    names = [f"class {number}" for number in range(classes)]
    folder = write_evaluation(run_dir, names=names, wrong=900, thumbnails=False)
    page = report_on(run_dir)
    evaluation = evaluation_of(folder)
    assert bool(evaluation.cells()) == has_matrix == ('<table class="matrix' in page)
    entries = json.loads((folder / "mistakes.json").read_text())
    counts = Counter((entry["label"], entry["prediction"]) for entry in entries)
    shown = {(label, prediction): count for count, label, prediction in evaluation.confused()}
    assert len(shown) == min(200, len(counts))
    assert all(counts[pair] == count for pair, count in shown.items())
    assert sorted(shown.values(), reverse=True) == sorted(counts.values(), reverse=True)[:200]
    assert len(page) < MB


def test_classes_are_compared_between_runs_the_most_changed_first(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate("abc")]
    folders = [write_evaluation(run, wrong=40 + 90 * n) for n, run in enumerate(runs)]
    write_evaluation(runs[0], folder="last-test", wrong=5)
    write_evaluation(runs[1], folder="best-validation", wrong=5)
    page = report_on(*runs[:2])
    assert page.count('aria-label="F1 of each class"') == 1
    head, *rows = table_rows(page, "F1 of each class")
    assert [re.sub("<.*?>", "", cell) for cell in head] == [
        "Class",
        "seed=0 · best-test",
        "seed=1 · best-test",
        "Difference in points",
    ]
    f1 = [dict(evaluation_of(folder).class_scores()) for folder in folders]
    changes = {name: f1[1][name]["f1"] - f1[0][name]["f1"] for name in DIGITS}
    order = sorted(DIGITS, key=lambda name: -abs(changes[name]))
    assert [abs(float(row[3])) for row in rows] == [
        pytest.approx(abs(100 * changes[name]), abs=0.006) for name in order
    ]
    for name, first, second, change in rows:
        assert first == f"{100 * f1[0][name]['f1']:.2f} %"
        assert second == f"{100 * f1[1][name]['f1']:.2f} %"
        assert change == f"{100 * changes[name]:+.2f}"
    head, *rows = table_rows(report_on(*runs), "F1 of each class")
    assert "Range in points" in head[-1]
    for name, *shares, spread in rows:
        values = [scores[name]["f1"] for scores in f1]
        assert len(shares) == 3
        assert float(spread) == pytest.approx(100 * (max(values) - min(values)), abs=0.006)


def test_a_class_that_one_run_does_not_have_is_compared_last(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    write_evaluation(runs[0], names=["cat", "dog", "<b>fox"])
    write_evaluation(runs[1], names=["cat", "dog", "owl"])
    rows = table_rows(report_on(*runs), "F1 of each class")
    assert {row[0] for row in rows[1:3]} == {"cat", "dog"}
    assert [[row[0], row[3]] for row in rows[3:]] == [["<b>fox", "—"], ["owl", "—"]]


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
        "mistakes/missing.png",
        "a\0b.png",
        "",
        ".",
        5,
        None,
        ["x"],
        "x" * 5000,
    ]
    (folder / "mistakes.json").write_text(
        json.dumps([good] + [good | {"picture": name} for name in names])
    )
    page = report_on(run_dir)
    mistakes = evaluation_of(folder).mistakes
    assert len(mistakes) == len(names) + 1
    assert [place for place, mistake in enumerate(mistakes) if mistake["picture"]] == [0]
    assert "evaluation/best-test/mistakes/text.png is not a PNG and was left out." in page


def test_a_file_system_that_does_not_answer_is_an_error_and_a_forbidden_file_a_note(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int) -> None:
        def fail(path: Path, *_: object) -> None:
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr("ddp_trainer.tools.folder_reader.open", fail, raising=False)

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
            "pictures/first_batch.png is not a PNG and was left out.",
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
        assert labels_of(report_on(copy))


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
    assert labels_of(report_on(run_dir))


def test_a_name_that_is_not_utf_8_has_a_page(tmp_path: Path) -> None:
    run_dir = write_run(Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff")))
    write_evaluation(run_dir).rename(os.fsdecode(os.fsencode(run_dir) + b"/evaluation/e\xff"))
    page = report_on(run_dir)
    assert labels_of(page) == ["r?"]
    assert "e?" in page


def test_rows_by_key_and_flatten_keep_the_order_of_keys() -> None:
    first = flat_texts({"b": {"x": 1, "y": {}}, "a": None})
    second = flat_texts({"a": None, "c": False})
    assert first == {"b.x": "1", "b.y": "{}", "a": "null"}
    assert rows_by_key([first, second]) == [
        ["b.x", "1", "—"],
        ["b.y", "{}", "—"],
        ["a", "null", "null"],
        ["c", "—", "false"],
    ]
