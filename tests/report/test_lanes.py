"""The lanes of ranks: what is read from ranks.jsonl and flight data, and how it is drawn."""

import json
from pathlib import Path

import pytest
from chromium import CHROMIUM, chromium
from run_dirs import write_run

from ddp_trainer.tools.report.files import RunFiles
from ddp_trainer.tools.report.lanes import MAX_CELLS, MAX_COLUMNS, MAX_RANKS, read_lanes
from ddp_trainer.tools.report.page import write_report


def write_ranks(run_dir: Path, ranks: int, rows: int, *, slow: int = 1) -> None:
    """Write ranks.jsonl: each step takes 10 ms, and on the slow rank the backward pass 4 ms more in
    the second half.
    """
    lines = []
    for row in range(1, rows + 1):
        late = 4.0 * (row > rows // 2)
        lines.append(
            {
                "time": 1.0,
                "step": 20 * row,
                "steps": 20,
                "forward": [3.0] * ranks,
                "backward": [7.0 + late * (rank == slow) for rank in range(ranks)],
                "memory_mb": [700.0] * ranks,
            }
        )
    (run_dir / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_flight(run_dir: Path, ranks: int, rows: int) -> None:
    (run_dir / "flight").mkdir()
    for rank in range(ranks):
        steps = range(5 + rank, 5 * (rows + 1), 5)
        lines = [
            {"step": step, "steps": 5, "forward": 3.0 + rank, "memory_mb": 9.0, "celsius": 0.0}
            for step in steps
        ]
        (run_dir / f"flight/rank-{rank:05}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )


def test_lanes_show_the_slow_rank_and_its_phase(tmp_path: Path) -> None:
    write_ranks(tmp_path, 3, 40)
    write_flight(tmp_path, 2, 10)
    whole, last = read_lanes(RunFiles(tmp_path))
    assert (whole.title, whole.ranks, whole.steps) == (
        "whole run",
        [0, 1, 2],
        list(range(20, 820, 20)),
    )
    assert whole.own_ms[1] == [10.0] * 20 + [14.0] * 20
    assert whole.worst[-1] == (1, "backward")
    assert whole.rows() == [
        ["1", "12.00 ms", "+20.0 %"],
        ["0", "10.00 ms", "+0.0 %"],
        ["2", "10.00 ms", "+0.0 %"],
    ]
    assert (last.title, last.ranks) == ("last minutes before the failure", [0, 1])
    assert {value for value in last.own_ms[1] if value is not None} == {4.0}


def test_long_runs_of_many_ranks_are_shortened(tmp_path: Path) -> None:
    write_ranks(tmp_path, 200, 500, slow=150)
    [lanes] = read_lanes(RunFiles(tmp_path))
    assert len(lanes.ranks) == MAX_RANKS
    assert 150 in lanes.ranks
    assert len(lanes.steps) == MAX_CELLS // MAX_RANKS < MAX_COLUMNS
    assert (lanes.steps[-1], lanes.worst[-1]) == (10_000, (lanes.ranks.index(150), "backward"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json\n",
        "[1]\n",
        '{"step": -1}\n',
        '{"step": 1}\n',
        '{"step": 1, "forward": []}\n',
        '{"step": 1, "forward": ["x", NaN, null, -1, true]}\n',
        '{"step": 1e400, "forward": [1]}\n',
        "[" * 10_000 + "\n",
    ],
)
def test_damaged_files_have_no_lanes(text: str, tmp_path: Path) -> None:
    (tmp_path / "ranks.jsonl").write_text(text)
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight/rank-x.jsonl").write_text(text)
    (tmp_path / "flight/rank-00001.jsonl").write_text(text)
    assert read_lanes(RunFiles(tmp_path)) == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
def test_the_lanes_are_drawn_and_described(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    write_ranks(run_dir, 4, 50)
    write_flight(run_dir, 4, 50)
    write_report([run_dir], tmp_path / "report.html")
    with chromium(tmp_path / "profile") as browser:
        page = browser.open(tmp_path / "report.html")
        text = "document.querySelector('.lane-text').textContent"
        pixel = """(() => {{ const canvas = document.querySelector('canvas.lanes');
            const [x, y] = [canvas.width * {x}, canvas.height * {y}];
            const at = canvas.getContext('2d').getImageData(x, y, 1, 1).data;
            return [...at].join() }})()"""
        quiet = page.evaluate(pixel.format(x=0.3, y=0.4))
        slow = page.evaluate(pixel.format(x=0.9, y=0.4))
        assert quiet == page.evaluate(pixel.format(x=0.9, y=0.1)) != slow
        page.evaluate("document.querySelector('canvas.lanes').focus()")
        for key, code in (("ArrowUp", 38), ("ArrowDown", 40), *[("ArrowRight", 39)] * 49):
            page.press(key, code=code)
        shown = page.evaluate(text)
        assert (
            shown
            == "Rank 1, up to step 1,000: 14 ms a step, 40 % slower than the median; slowest was"
            " rank 1, in backward"
        )
        page.evaluate(
            """(() => { const select = document.querySelector('#lanes select'); select.value = '1';
            select.dispatchEvent(new Event('change')) })()"""
        )
        assert "before the failure" in page.evaluate(
            "document.querySelector('canvas.lanes').getAttribute('aria-label')"
        )
        # this test reads pixels
        assert not [error for error in page.errors if "willReadFrequently" not in error]
