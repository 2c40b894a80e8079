"""The page of a report in Chromium: it draws, compares, opens mistakes, and runs nothing of what
files hold.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import CHROMIUM, Chromium, Page, chromium
from run_dirs import DIGITS, START, write_evaluation, write_run

from ddp_trainer.tools.report.page import write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")

ENTER = {"key": "Enter", "code": 13, "text": "\r"}
ESCAPE = {"key": "Escape", "code": 27}
SPACE = {"key": " ", "code": 32, "text": " "}
ARROWS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
HOSTILE = "</script><img src=x onerror=\"window.attacked='1'\">\n<!-- '\"&\u2028{{ 7 * 7 }}"

Opener = Callable[..., Page]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("profile")) as process:
        yield process


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run that was resumed twice, and one of another learning rate, with three evaluations."""
    folder = tmp_path_factory.mktemp("runs")
    first = write_run(folder / "first", launches=((0, 4), (300, 2), (700, 3)))
    second = write_run(folder / "second", lr=0.1, seed=1, launches=((0, 4),))
    write_evaluation(first)
    write_evaluation(first, folder="last-validation", wrong=90)
    write_evaluation(second)
    return [first, second]


@pytest.fixture(scope="module")
def two_runs_page(two_runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(two_runs, path)
    return path


@pytest.fixture
def open_page(browser: Chromium) -> Iterator[Opener]:
    """A function that opens a report; in the end no page may have logged an error or loaded
    anything else.
    """
    pages: list[tuple[Page, Path]] = []

    def open_it(path: Path, **options: Any) -> Page:
        pages.append((browser.open(path, **options), path))
        return pages[-1][0]

    yield open_it
    for page, path in pages:
        page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")
        assert page.errors == []
        assert [url for url in page.requests if not url.startswith("data:")] == [
            path.resolve().as_uri()
        ]
        browser.close(page)


def report_on(*run_dirs: Path) -> Path:
    write_report(run_dirs, run_dirs[0] / "report.html")
    return run_dirs[0] / "report.html"


def test_errors_and_requests_of_a_page_are_noted(browser: Chromium, tmp_path: Path) -> None:
    """So that the other tests, which expect none, cannot pass because nothing is noted."""
    path = tmp_path / "page.html"
    path.write_text(
        "<img src='missing.png'><script>window.__report = 1; console.log('a'); throw"
        " Error('b')</script>"
    )
    page = browser.open(path)
    page.wait_for("document.images[0].complete")
    assert any("console.log" in error for error in page.errors)
    assert any("Error: b" in error for error in page.errors)
    assert [Path(url).name for url in page.requests] == ["page.html", "missing.png"]
    browser.close(page)


def test_the_overview_names_each_run_with_its_color_and_its_results(
    open_page: Opener, two_runs_page: Path
) -> None:
    page = open_page(two_runs_page)
    cards = page.evaluate(
        "[...document.querySelectorAll('.run-card')].map((card) => card.innerText)"
    )
    lines = [list(filter(None, card.splitlines())) for card in cards]
    assert lines == [
        [
            "first",
            "finished",
            "test top-1",
            "89.17 %",
            "best top-1",
            "90.01 %",
            "steps",
            "1,000",
            "epochs",
            "10",
            "duration",
            "1 h 2 min",
            "ranks",
            "4 → 2 → 3",
            "speed",
            "12,927 img/s",
            "device",
            "cpu",
            "3 launches",
        ],
        [
            "second",
            "finished",
            "test top-1",
            "84.17 %",
            "best top-1",
            "85.01 %",
            "steps",
            "1,000",
            "epochs",
            "10",
            "duration",
            "1 h 2 min",
            "ranks",
            "4",
            "speed",
            "12,927 img/s",
            "device",
            "cpu",
        ],
    ]
    color = "getComputedStyle(document.querySelectorAll('.run-card .swatch')[{}]).backgroundColor"
    assert [page.evaluate(color.format(place)) for place in (0, 1)] == [
        "rgb(0, 114, 178)",
        "rgb(213, 94, 0)",
    ]


# --- curves ---------------------------------------------------------------------------------------


SCALES = (
    "window.__report.charts.filter(({ plot }) => plot).map(({ plot }) => [plot.scales.x.min,"
    " plot.scales.x.max])"
)


def scales_of(page: Page) -> list[list[float]]:
    scales = page.evaluate(SCALES)
    assert len(scales) == 8
    return scales


def drag(page: Page, selector: str, *, to_right: float) -> None:
    x, y = page.center(selector)
    page.mouse("mouseMoved", x, y)
    page.mouse("mousePressed", x, y)
    page.mouse("mouseMoved", x + to_right / 2, y, buttons=1, button="left")
    page.mouse("mouseMoved", x + to_right, y, buttons=1, button="left")
    page.mouse("mouseReleased", x + to_right, y)


def test_the_crosshair_shows_the_values_of_all_runs_in_all_charts(
    open_page: Opener, two_runs_page: Path
) -> None:
    page = open_page(two_runs_page)
    assert page.evaluate("document.querySelector('#charts .at').textContent") == "last values"
    x, y = page.center("#charts .u-over")
    page.mouse("mouseMoved", x, y)
    page.wait_for("document.querySelector('#charts .at').textContent !== 'last values'")
    parts = "[chart.querySelector('.at').textContent, chart.querySelector('.legend').textContent]"
    texts = page.evaluate(
        f"[...document.querySelectorAll('#charts .chart')].map((chart) => {parts})"
    )
    assert len(texts) == 7
    assert {at for at, _ in texts} == {"step 500"}
    shown = page.evaluate("window.__report.charts[0].plot.data.map((column) => column[24])")
    assert shown[0] == 500
    assert texts[0][1] == f"first{shown[1]:.4g}second{shown[2]:.4g}"
    for _, legend in texts:
        assert legend.startswith("first")
        assert "second" in legend
        assert "—" not in legend


def test_dragging_zooms_all_charts_and_a_double_click_or_the_button_resets(
    open_page: Opener, two_runs_page: Path
) -> None:
    page = open_page(two_runs_page)
    assert scales_of(page) == [[0, 1000]] * 8
    for reset in ("double click", "button"):
        drag(page, "#charts .u-over", to_right=100)
        page.wait_for(f"{SCALES}[0][0] > 0")
        low, high = scales_of(page)[0]
        assert scales_of(page) == [[low, high]] * 8
        assert 450 < low < 550 < high < 800
        if reset == "button":
            page.click(".reset")
        else:
            x, y = page.center("#charts .u-over")
            for count in (1, 2):
                page.mouse("mousePressed", x, y, clickCount=count)
                page.mouse("mouseReleased", x, y, clickCount=count)
        page.wait_for(f"{SCALES}[0][0] === 0")
        assert scales_of(page) == [[0, 1000]] * 8


def test_a_finger_zooms_too(open_page: Opener, two_runs_page: Path) -> None:
    page = open_page(two_runs_page, width=390)
    page.send("Emulation.setTouchEmulationEnabled", enabled=True)
    x, y = page.center("#charts .u-over")
    page.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    for distance in (20, 40, 60, 80):
        page.send(
            "Input.dispatchTouchEvent", type="touchMove", touchPoints=[{"x": x + distance, "y": y}]
        )
    page.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    page.wait_for(f"{SCALES}[0][0] > 0")
    assert page.evaluate("window.scrollX") == 0


def test_the_keys_move_the_crosshair_and_zoom(open_page: Opener, two_runs_page: Path) -> None:
    page = open_page(two_runs_page)
    page.evaluate("document.querySelector('#charts .plot').focus()")
    page.press("ArrowRight", code=ARROWS["ArrowRight"])
    at = page.evaluate("[...document.querySelectorAll('#charts .at')].map((at) => at.textContent)")
    # the nearest of each curve
    assert at == [f"step {step}" for step in (520, 500, 520, 500, 520, 520, 520)]
    page.press("+", text="+")
    assert scales_of(page) == [[260, 760]] * 8
    page.press("0", text="0")
    assert scales_of(page) == [[0, 1000]] * 8


def test_the_x_axis_is_step_epoch_or_time_with_a_gap_at_each_resume(
    open_page: Opener, two_runs_page: Path
) -> None:
    page = open_page(two_runs_page)
    columns = "window.__report.charts[0].plot.data"
    assert page.evaluate(f"[...{columns}[0]].slice(0, 3)") == [20, 40, 60]
    page.evaluate("document.querySelector('[value=epoch]').click()")
    assert page.evaluate(f"[...{columns}[0]].slice(0, 3)") == pytest.approx([0.2, 0.4, 0.6])
    assert scales_of(page) == [[0, 10]] * 8
    page.evaluate("document.querySelector('[value=time]').click()")
    assert all(1200 < high < 1300 for _, high in scales_of(page))
    assert (
        page.evaluate(
            f"{columns}[1].reduce((n, value, i, all) => n + (value === null && all[i - 1] !=="
            " null), 0)"
        )
        == 2
    )
    assert page.evaluate(f"{columns}[2].includes(null)") is False


def test_marks_name_resumes_and_world_sizes(
    open_page: Opener, tmp_path: Path, two_runs: list[Path]
) -> None:
    source = report_on(*(shutil.copytree(run, tmp_path / run.name) for run in two_runs))
    recorder = (
        "<script>const texts = window.texts = new Set(), draw ="
        " CanvasRenderingContext2D.prototype.fillText;CanvasRenderingContext2D.prototype.fillText ="
        " function (text, ...rest) { texts.add(text); draw.call(this, text, ...rest); }</script>"
    )
    text = source.read_text()
    without_policy = text.replace('http-equiv="Content-Security-Policy"', "name=x")
    assert without_policy != text
    source.write_text(without_policy.replace("<style>", f"{recorder}<style>", 1))
    page = open_page(source)
    assert {"resumed, 2 ranks", "resumed, 3 ranks"} <= set(page.evaluate("[...window.texts]"))


def test_smoothing_hiding_a_run_and_the_log_scale_change_the_charts(
    open_page: Opener, two_runs_page: Path
) -> None:
    page = open_page(two_runs_page)
    plot = "window.__report.charts[0].plot"
    raw = page.evaluate(f"{plot}.data[1]")
    page.evaluate(
        "(() => { const slider = document.querySelector('input[type=range]'); slider.value = 33.3;"
        " slider.dispatchEvent(new Event('input')); })()"
    )
    average = 0.0
    total = 0.0
    expected = []
    weight = float(page.evaluate("window.__report.view.smoothing"))
    assert 0.85 < weight < 0.95
    for value in raw:
        average = weight * average + (1 - weight) * value
        total = weight * total + (1 - weight)
        expected.append(average / total)
    assert page.evaluate(f"{plot}.data[3]") == pytest.approx(expected)
    assert page.evaluate(f"{plot}.data[1]") == raw
    page.click("#toolbar > label:nth-of-type(2) input")
    assert page.evaluate(f"{plot}.scales.y.distr") == 3
    page.click("#toolbar .runs input")
    assert page.evaluate(f"{plot}.series.map(({{ show }}) => show)") == [
        True,
        False,
        True,
        False,
        True,
    ]


def test_the_phases_of_a_step_add_up(
    open_page: Opener, two_runs_page: Path, two_runs: list[Path]
) -> None:
    page = open_page(two_runs_page)
    lines = map(json.loads, (two_runs[1] / "metrics.jsonl").read_text().splitlines())
    expected = [line["time/step_ms"] for line in lines if "time/step_ms" in line]
    page.evaluate(
        "(() => { const select = document.querySelector('#steps select'); select.value = '1';"
        " select.dispatchEvent(new Event('change')); })()"
    )
    top = page.evaluate("[...window.__report.charts.at(-1).plot.data[1]]")
    assert top[1:] == pytest.approx(expected, rel=1e-4)
    page.click("#steps input[type=checkbox]")
    assert page.evaluate("[...window.__report.charts.at(-1).plot.data[1]]") == pytest.approx(
        [1] * len(top)
    )


def test_a_hundred_thousand_points_are_drawn_in_a_second(open_page: Opener, tmp_path: Path) -> None:
    for name, offset in (("one", 0), ("other", 1)):
        run_dir = tmp_path / name
        run_dir.mkdir()
        (run_dir / "config.yaml").write_text(f"name: {name}\n")
        losses = [2.3 * math.exp(-step / 9000) + 0.1 * math.sin(step) for step in range(50_000)]
        records = [
            {
                "time": START + step / 10,
                "step": 2 * step + offset,
                "epoch": step // 1000,
                "train/loss": loss,
            }
            for step, loss in enumerate(losses)
        ]
        (run_dir / "metrics.jsonl").write_text(
            "".join(f"{json.dumps(record)}\n" for record in records)
        )
    path = report_on(tmp_path / "one", tmp_path / "other")
    seconds = []
    for _ in range(3):  # other tests run at the same time
        page = open_page(path)
        seconds.append(page.evaluate("window.__report.milliseconds") / 1000)
        count = "(column) => column.filter((value) => typeof value === 'number').length"
        assert page.evaluate(f"window.__report.charts[0].plot.data.map({count})") == [
            100_000,
            *[50_000] * 4,
        ]
        assert page.evaluate("document.querySelector('#charts canvas').width") > 500
        if seconds[-1] < 1:
            break
    assert min(seconds) < 1, seconds


# --- evaluations ----------------------------------------------------------------------------------


def cell_with_mistakes(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the worst mistake of an evaluation and the selector of its cell."""
    mistake = json.loads((folder / "mistakes.json").read_text())[0]
    row = DIGITS.index(mistake["label"])
    column = DIGITS.index(mistake["prediction"])
    return mistake, f"[data-row='{row}'][data-column='{column}']"


def dialog_texts(page: Page) -> list[str]:
    assert page.evaluate("document.querySelector('#dialog').open")
    return page.evaluate(
        "[...document.querySelectorAll('#dialog .mistake')].map((figure) => figure.textContent)"
    )


@pytest.mark.parametrize("how", ["click", "Enter", "Space"])
def test_a_cell_opens_its_mistakes_and_escape_returns_to_it(
    how: str, open_page: Opener, two_runs: list[Path], two_runs_page: Path
) -> None:
    folder = two_runs[0] / "evaluation" / "best-test"
    mistake, cell = cell_with_mistakes(folder)
    page = open_page(two_runs_page)
    assert page.evaluate("document.querySelector('#dialog').open") is False
    if how == "click":
        page.click(cell)
    else:
        page.evaluate(f"document.querySelector(`{cell}`).focus()")
        page.press(**(ENTER if how == "Enter" else SPACE))
    texts = dialog_texts(page)
    same = [
        entry
        for entry in json.loads((folder / "mistakes.json").read_text())
        if (entry["label"], entry["prediction"]) == (mistake["label"], mistake["prediction"])
    ]
    assert len(texts) == len(same)
    for text, entry in zip(texts, same, strict=True):
        assert entry["path"] in text
        assert f"probability {100 * entry['probability']:.1f} %" in text
        assert f"loss {entry['loss']:.4g}" in text
    page.wait_for(
        "[...document.querySelectorAll('#dialog img')].every((image) => image.naturalWidth === 8)"
    )
    assert (
        page.evaluate("getComputedStyle(document.querySelector('#dialog img')).imageRendering")
        == "pixelated"
    )
    assert page.evaluate("document.querySelector('#dialog img').width") == 112
    page.press(**ESCAPE)
    page.wait_for("!document.querySelector('#dialog').open")
    assert page.evaluate(f"document.activeElement === document.querySelector(`{cell}`)")


def test_the_arrow_keys_move_between_cells_of_which_one_is_a_tab_stop(
    open_page: Opener, two_runs_page: Path
) -> None:
    page = open_page(two_runs_page)
    page.evaluate("document.querySelector('[data-row]').focus()")
    place = "[document.activeElement.dataset.row, document.activeElement.dataset.column].join()"
    for key, expected in [
        ("ArrowRight", "0,1"),
        ("ArrowDown", "1,1"),
        ("ArrowLeft", "1,0"),
        ("ArrowLeft", "1,0"),
        ("ArrowUp", "0,0"),
        ("ArrowUp", "0,0"),
    ]:
        page.press(key, code=ARROWS[key])
        assert page.evaluate(place) == expected
    page.press("End", code=35)
    assert page.evaluate(place) == "0,9"
    assert (
        page.evaluate(
            "[...document.querySelectorAll('[data-row]')].filter(({ tabIndex }) => tabIndex ==="
            " 0).length"
        )
        == 1
    )


def test_another_evaluation_can_be_selected(open_page: Opener, two_runs_page: Path) -> None:
    page = open_page(two_runs_page)
    names = page.evaluate(
        "[...document.querySelectorAll('#evaluation option')].map(({ textContent }) => textContent)"
    )
    assert names == ["first · best-test", "first · last-validation", "second · best-test"]
    images = "[...document.querySelectorAll('#panel .facts dd')][0].textContent"
    assert page.evaluate(images) == "340"
    page.evaluate(
        "(() => { const select = document.querySelector('#evaluation select'); select.value = '1';"
        " select.dispatchEvent(new Event('change')); })()"
    )
    assert page.evaluate(images) == "390"


def test_many_classes_have_a_list_of_pairs_in_place_of_a_matrix(
    open_page: Opener, tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path / "run", steps=100)
    names = [f"class {number}" for number in range(61)]
    folder = write_evaluation(run_dir, names=names, wrong=300)
    page = open_page(report_on(run_dir))
    assert page.evaluate("document.querySelectorAll('.matrix').length") == 0
    page.evaluate("document.querySelector('.pairs button').focus()")
    page.press(**ENTER)
    text = dialog_texts(page)[0]
    assert any(
        entry["path"] in text for entry in json.loads((folder / "mistakes.json").read_text())
    )


def test_the_table_of_classes_is_sorted_by_click_and_by_enter(
    open_page: Opener, two_runs_page: Path
) -> None:
    page = open_page(two_runs_page)
    column = (
        "[...document.querySelectorAll('.sortable tbody tr')].map((row) =>"
        " parseFloat(row.children[2].textContent))"
    )
    head = ".sortable th:nth-child(3)"
    unsorted = page.evaluate(column)
    page.click(f"{head} button")
    assert page.evaluate(column) == sorted(unsorted) != unsorted
    assert page.evaluate(f"document.querySelector('{head}').ariaSort") == "ascending"
    page.press(**ENTER)
    assert page.evaluate(column) == sorted(unsorted, reverse=True)


# --- the page -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_does_not_scroll_sideways(
    width: int, open_page: Opener, two_runs_page: Path
) -> None:
    page = open_page(two_runs_page, width=width)
    assert page.evaluate("document.querySelectorAll('.matrix button').length") == 100
    page.evaluate(
        "document.querySelectorAll('details').forEach((details) => { details.open = true; })"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(
        "window.__report.charts.every(({ figure }) => figure.clientWidth <= innerWidth)"
    )


def test_the_button_changes_the_theme_also_of_the_charts(
    open_page: Opener, two_runs_page: Path
) -> None:
    page = open_page(two_runs_page, dark=True)
    look = (
        "[getComputedStyle(document.body).backgroundColor, document.querySelector('#charts"
        " canvas').toDataURL()]"
    )
    dark = page.evaluate(look)
    page.click("#theme")
    page.wait_for(f"{look}[1] !== {json.dumps(dark[1])}")
    light = page.evaluate(look)
    assert (dark[0], light[0]) == ("rgb(14, 19, 24)", "rgb(244, 246, 248)")


def test_names_from_files_do_nothing(open_page: Opener, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "<b>run</b>&amp;", steps=100)
    names = [HOSTILE, "__proto__", "constructor", "a" * 300]
    folder = write_evaluation(run_dir, folder="<i>best-test", names=names, wrong=12)
    mistakes = json.loads((folder / "mistakes.json").read_text())
    (folder / "mistakes.json").write_text(
        json.dumps([entry | {"path": HOSTILE} for entry in mistakes])
    )
    (run_dir / "config.yaml").write_text(json.dumps({HOSTILE: HOSTILE, "name": HOSTILE}))
    (run_dir / "versions.json").write_text(json.dumps({HOSTILE: HOSTILE, "half": "\ud800"}))
    (run_dir / "summary.json").write_text(
        json.dumps({"status": HOSTILE, HOSTILE: HOSTILE, "device": HOSTILE})
    )
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.writelines(
            json.dumps({"step": step, HOSTILE: step, "__proto__": step}) + "\n" for step in (1, 2)
        )
    page = open_page(report_on(run_dir), width=390)
    page.evaluate(
        "document.querySelectorAll('details').forEach((details) => { details.open = true; })"
    )
    page.wait_for("window.__report.charts.every(({ plot }) => plot)")
    page.click(".matrix button.wrong")
    assert page.evaluate("window.attacked") is None
    assert page.evaluate("[...document.images].every((image) => image.src.startsWith('data:'))")
    text = page.evaluate("document.querySelector('main').textContent")
    assert text.count(HOSTILE) >= 20
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def edit_records(run_dir: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = run_dir / "metrics.jsonl"
    records = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def diverge(run_dir: Path) -> None:
    (run_dir / "summary.json").unlink()
    edit_records(
        run_dir, lambda record: record | {"train/loss": "nan"} if record["step"] == 400 else record
    )


def version_1(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text(
        "model: {name: resnet18}\nnum_microbatches: 2\ndata: {name: digits, flip: true}\n"
    )
    (run_dir / "versions.json").unlink()
    shutil.rmtree(run_dir / "pictures")
    edit_records(
        run_dir,
        lambda record: {
            key: value for key, value in record.items() if not key.startswith("launch/")
        },
    )


def stop(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps(summary | {"status": "stopped"}))


def remove_metrics(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text("")


def keep_one_record(run_dir: Path) -> None:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:2]))


@pytest.mark.parametrize(
    ("change", "status", "num_charts", "text"),
    [
        (diverge, "diverged", 8, "The training diverged at step 400: train/loss is nan."),
        (stop, "stopped", 8, "Pause before"),
        (version_1, "finished", 8, "There is no versions.json"),
        (remove_metrics, "finished", 0, "There is no metrics.jsonl with records"),
        (
            keep_one_record,
            "finished",
            6,
            "This command writes one: python -m ddp_trainer evaluate ",
        ),
    ],
)
def test_every_kind_of_run_has_a_page(
    change: Callable[[Path], None],
    status: str,
    num_charts: int,
    text: str,
    open_page: Opener,
    tmp_path: Path,
) -> None:
    run_dir = write_run(tmp_path / "run", launches=((0, 4), (500, 2)))
    change(run_dir)
    page = open_page(report_on(run_dir))
    assert page.evaluate("document.querySelector('.badge').textContent") == status
    assert text in " ".join(page.evaluate("document.body.textContent").split())
    for mode in ("time", "epoch"):
        page.evaluate(f"document.querySelector('[value={mode}]')?.click()")
    assert page.evaluate("window.__report.charts.filter(({ plot }) => plot).length") == num_charts
