"""The page of a report in Chromium: it draws, selects mistakes, and runs no text of files."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import CHROMIUM, Chromium, Page, chromium
from run_dirs import digit_png, write_evaluation, write_run

from ddp_trainer.tools.report.page import write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")

ENTER = {"key": "Enter", "code": 13, "text": "\r"}
ESCAPE = {"key": "Escape", "code": 27}
SPACE = {"key": " ", "code": 32, "text": " "}
ARROWS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
HOSTILE = "</script><img src=x onerror=\"window.attacked='1'\">\n<!-- '\"&\u2028{{ 7 * 7 }}"

FIRST = "optimizer.lr=0.05, seed=0"
SECOND = "optimizer.lr=0.1, seed=1"
"""The labels of the two runs."""

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
    """Return a function that opens a report, which must log no error and load nothing else."""
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
    path.write_text("<img src='missing.png'><script>console.log('a'); throw Error('b')</script>")
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
    texts = "[...document.querySelectorAll('#overview tr')].map((row) => row.innerText)"
    rows = [re.split(r"[\n\t]+", text) for text in page.evaluate(texts)]
    results = [["90.01 %", "89.17 %"], ["85.01 %", "84.17 %"]]
    facts = ["0.2013", "1,000", "10", "1:02:06", "12,927"]
    assert rows[1:] == [
        [FIRST, "finished", *results[0], *facts, "4 → 2 → 3", "cpu"],
        [SECOND, "finished", *results[1], *facts, "4", "cpu"],
    ]
    color = "getComputedStyle(document.querySelectorAll('#overview .swatch')[{}]).backgroundColor"
    assert [page.evaluate(color.format(place)) for place in (0, 1)] == [
        "rgb(0, 114, 178)",
        "rgb(213, 94, 0)",
    ]


def test_the_card_of_one_run_has_its_results(
    open_page: Opener, two_runs: list[Path], tmp_path: Path
) -> None:
    write_report(two_runs[:1], tmp_path / "report.html")
    page = open_page(tmp_path / "report.html")
    text = page.evaluate("document.querySelector('#overview .card').innerText")
    facts = ["steps", "1,000", "epochs", "10", "duration", "1:02:06", "ranks", "4 → 2 → 3"]
    assert list(filter(None, text.splitlines())) == [
        *("first", "finished", "test top-1", "89.17 %", "best top-1", "90.01 %"),
        *(*facts, "images / s", "12,927", "device", "cpu"),
    ]


@pytest.mark.parametrize("how", ["click", "Enter", "Space"])
def test_a_head_of_the_table_sorts_the_runs(how: str, open_page: Opener, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{seed}", seed=seed, lr=0.05) for seed in range(4)]
    seconds = [30.5, 200, None, 9]
    for run, value in zip(runs, seconds, strict=True):
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(summary | {"seconds": value}))
    page = open_page(report_on(*runs))
    heads = "[...document.querySelectorAll('#overview th[scope=col]')]"
    place = page.evaluate(f"{heads}.findIndex((head) => head.innerText.includes('Duration'))")
    button = f"#overview thead th:nth-child({place + 1}) button"

    def sort() -> tuple[list[str], list[str | None]]:
        """Return the order of the runs' seeds and aria-sort of all heads."""
        if how == "click":
            page.click(button)
        else:
            page.evaluate(f"document.querySelector('{button}').focus()")
            page.press(**(ENTER if how == "Enter" else SPACE))
        names = "[...document.querySelectorAll('#overview tbody th')].map((row) => row.innerText)"
        order = [name.strip().removeprefix("seed=") for name in page.evaluate(names)]
        return order, page.evaluate(f"{heads}.map((head) => head.getAttribute('aria-sort'))")

    states: list[str | None] = [None] * page.evaluate(f"{heads}.length")
    states[place] = "descending"
    assert sort() == (["1", "0", "3", "2"], states)  # what is unknown is last
    states[place] = "ascending"
    assert sort() == (["3", "0", "1", "2"], states)
    page.evaluate("document.querySelector('#overview thead button').click()")
    by_name = "document.querySelector('#overview tbody').innerText.match(/seed=\\d/g)"
    assert page.evaluate(by_name) == [f"seed={seed}" for seed in range(4)]


# --- curves ---------------------------------------------------------------------------------------


def test_the_charts_have_a_line_for_each_run_in_its_color(
    open_page: Opener, two_runs_page: Path
) -> None:
    page = open_page(two_runs_page)
    titles = "[...document.querySelectorAll('#curves strong')].map((title) => title.textContent)"
    assert page.evaluate(titles) == ["Loss", "Top-1", "Learning rate", "Images per second"]
    lines = "[...document.querySelectorAll('.chart')[0].querySelectorAll('.line')]"
    boxes = page.evaluate(
        f"{lines}.map((line) => [getComputedStyle(line).stroke, line.getBBox().width])"
    )
    assert [color for color, _ in boxes] == ["rgb(0, 114, 178)", "rgb(213, 94, 0)"] * 2
    assert all(250 < width <= 320 for _, width in boxes)
    resumes = "[...document.querySelectorAll('.chart')[0].querySelectorAll('.resume title')]"
    assert page.evaluate(f"{resumes}.map((title) => title.textContent.trim())") == [
        f"{FIRST}: resumed with world size 2",
        f"{FIRST}: resumed with world size 3",
    ]
    legend = "document.querySelector('#curves .legend').innerText"
    assert page.evaluate(legend).count("evaluation") == 2
    dots = "[...document.querySelectorAll('.chart')[0].querySelectorAll('.dots')]"
    widths = f"{dots}.map((path) => getComputedStyle(path).strokeWidth)"
    assert page.evaluate(widths) == ["5px", "5px"]


# --- evaluations ----------------------------------------------------------------------------------


def shown_mistakes(page: Page) -> list[str]:
    return page.evaluate(
        "[...document.querySelectorAll('.evaluation[open] .mistake:not([hidden])')]"
        ".map((figure) => figure.textContent)"
    )


@pytest.mark.parametrize("how", ["click", "Enter"])
def test_a_cell_shows_its_mistakes_and_a_button_all_of_them(
    how: str, open_page: Opener, two_runs: list[Path], two_runs_page: Path
) -> None:
    folder = two_runs[0] / "evaluation" / "best-test"
    entries = json.loads((folder / "mistakes.json").read_text())
    pair = (entries[0]["label"], entries[0]["prediction"])
    link = f"a[data-label='{pair[0]}'][data-prediction='{pair[1]}']"
    page = open_page(two_runs_page)
    assert len(shown_mistakes(page)) == len(entries)
    if how == "click":
        page.click(link)
    else:
        page.evaluate(f"document.querySelector(`{link}`).focus()")
        page.press(**ENTER)
    same = [entry for entry in entries if (entry["label"], entry["prediction"]) == pair]
    texts = shown_mistakes(page)
    assert len(texts) == len(same) < len(entries)
    for text, entry in zip(texts, same, strict=True):
        assert entry["path"] in text
        assert f"probability {100 * entry['probability']:.2f} %" in text
        assert f"loss {entry['loss']:.4g}" in text
    image = "document.querySelector('.mistake:not([hidden]) img')"
    page.wait_for(f"{image}.naturalWidth === 8")
    assert page.evaluate(f"getComputedStyle({image}).imageRendering") == "pixelated"
    assert page.evaluate(f"{image}.width") == 96
    assert page.evaluate("document.activeElement.className") == "all"
    page.press(**ENTER)
    assert len(shown_mistakes(page)) == len(entries)


def test_another_evaluation_can_be_opened(open_page: Opener, two_runs_page: Path) -> None:
    page = open_page(two_runs_page)
    names = page.evaluate(
        "[...document.querySelectorAll('.evaluation > summary')].map(({ innerText }) => innerText)"
    )
    assert [" ".join(name.split()) for name in names] == [
        f"{FIRST} · best-test",
        f"{FIRST} · last-validation",
        f"{SECOND} · best-test",
    ]
    opened = "[...document.querySelectorAll('.evaluation')].map(({ open }) => open)"
    assert page.evaluate(opened) == [True, False, False]
    page.click(".evaluation:nth-of-type(2) > summary")
    assert page.evaluate(opened) == [True, True, False]


def test_many_classes_have_a_list_of_pairs_in_place_of_a_matrix(
    open_page: Opener, tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path / "run", steps=100)
    names = [f"class {number}" for number in range(61)]
    write_evaluation(run_dir, names=names, wrong=300)
    page = open_page(report_on(run_dir))
    assert page.evaluate("document.querySelectorAll('.matrix').length") == 0
    pair = page.evaluate("document.querySelector('.pairs a').textContent")
    page.evaluate("document.querySelector('.pairs a').focus()")
    page.press(**ENTER)
    texts = [" ".join(text.split()) for text in shown_mistakes(page)]
    assert 0 < len(texts) < 50
    assert all(text.startswith(pair) for text in texts)


# --- the page -------------------------------------------------------------------------------------


def test_long_names_of_classes_are_shown_or_end_in_an_ellipsis(
    open_page: Opener, tmp_path: Path
) -> None:
    names = ["American Staffordshire terrier", "wirehaired pointing griffon dog", "W" * 80, "cat"]
    run_dir = write_run(tmp_path / "run")
    write_evaluation(run_dir, names=names)
    page = open_page(report_on(run_dir))
    cut = "[...document.querySelectorAll('{}')].map((item) => item.{} > item.{})"
    heads = page.evaluate(cut.format(".matrix tbody span", "scrollHeight", "clientHeight"))
    assert heads == [False, False, True, False]
    names = page.evaluate(cut.format(".mistake bdi", "scrollWidth", "clientWidth"))
    assert not any(names)
    columns = "getComputedStyle(document.querySelector('.matrix thead span')).textOverflow"
    assert page.evaluate(columns) == "ellipsis"
    heights = "[...document.querySelectorAll('.matrix tbody tr')].map((row) => row.clientHeight)"
    assert len(set(page.evaluate(heights))) == 1


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_does_not_scroll_sideways(
    width: int, open_page: Opener, two_runs_page: Path
) -> None:
    page = open_page(two_runs_page, width=width)
    assert page.evaluate("document.querySelectorAll('.evaluation[open] .matrix td').length") == 101
    page.evaluate(
        "document.querySelectorAll('details').forEach((details) => { details.open = true; })"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    inside = (
        "[...document.querySelectorAll('svg')].every((chart) => chart.clientWidth <= innerWidth)"
    )
    assert page.evaluate(inside)


@pytest.mark.parametrize(
    ("dark", "color"), [(True, "rgb(14, 19, 24)"), (False, "rgb(244, 246, 248)")]
)
def test_the_page_follows_the_theme_of_the_system(
    dark: bool, color: str, open_page: Opener, two_runs_page: Path
) -> None:
    page = open_page(two_runs_page, dark=dark)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == color


def test_the_button_changes_the_theme(browser: Chromium, two_runs_page: Path) -> None:
    page = browser.open(two_runs_page, dark=True)
    text = "document.querySelector('#theme').innerText"
    color = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(color)
    seen = []
    for _ in range(3):
        page.click("#theme")
        seen.append((page.evaluate(text), page.evaluate(color)))
    light = "rgb(244, 246, 248)"
    assert seen == [("Theme: light", light), ("Theme: dark", dark), ("Theme: auto", dark)]
    page.click("#theme")
    # by hand, because right after Chromium's start one page may not see what another has stored
    stored = page.evaluate("JSON.stringify(localStorage)")
    script = f"Object.assign(localStorage, {stored})"
    page.send("Page.addScriptToEvaluateOnNewDocument", source=script)
    page.visit(two_runs_page)
    assert page.evaluate(color) == light, "the choice is kept"
    page.evaluate("localStorage.clear()")
    # as in a browser that stores nothing for local files
    denied = "{ get() { throw Error('denied'); } }"
    page.evaluate(f"Object.defineProperty(window, 'localStorage', {denied}); true")
    page.click("#theme")
    assert (page.evaluate(text), page.evaluate(color)) == ("Theme: dark", dark)
    assert page.errors == []
    browser.close(page)


def test_labels_in_the_first_batch_are_shown_at_their_size(
    open_page: Opener, tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / "pictures/first_batch.png").write_bytes(digit_png(1, side=1088))
    page = open_page(report_on(run_dir), width=360)
    page.wait_for("document.querySelector('.batch').naturalWidth === 1088")
    assert page.evaluate("document.querySelector('.batch').width") == 1088
    assert page.evaluate("document.documentElement.scrollWidth") == 360


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
    bad_image = json.dumps({"path": HOSTILE, "reason": HOSTILE})
    (run_dir / "bad_images.jsonl").write_text(bad_image)
    other = shutil.copytree(run_dir, tmp_path / "other")
    change = {"name": HOSTILE, HOSTILE: f"{HOSTILE} other", "seed": HOSTILE}
    (other / "config.yaml").write_text(json.dumps(change))
    page = open_page(report_on(run_dir, other), width=390)
    page.evaluate(
        "document.querySelectorAll('details').forEach((details) => { details.open = true; })"
    )
    page.click(".sortable button")
    page.click(".matrix a")
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
        run_dir,
        lambda record: (
            record | {"train/loss": "nan"}
            if record["step"] >= 400 and "train/loss" in record
            else record
        ),
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
        (diverge, "diverged", 4, "The training diverged at step 400: its loss is not finite."),
        (stop, "stopped", 4, "ranks4 → 2"),
        (version_1, "finished", 4, "There is no versions.json"),
        (remove_metrics, "finished", 0, "There is no metrics.jsonl with records"),
        (
            keep_one_record,
            "finished",
            4,
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
    assert page.evaluate("document.querySelectorAll('.chart').length") == num_charts
