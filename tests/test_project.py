"""The project's shell: the wheel, what the papers say about the code, and what CI holds."""

import inspect
import re
import shlex
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from itertools import product
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from processes import run_command, run_forked, torchrun
from runs import compose, read_summary

import ddp_trainer
from ddp_trainer import registry
from ddp_trainer.config.messages import quote_texts
from ddp_trainer.launchers.sweeps import register_launchers

ROOT = Path(__file__).resolve().parents[1]
PAPERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


# --- the wheel ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the source distribution, as an index would have it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t"]
    subprocess.run([*build, "sdist"], cwd=ROOT, check=True, timeout=60)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(folder, filter="data")
    subprocess.run(
        [*build, "wheel"], cwd=folder / archive.name.removesuffix(".tar.gz"), check=True, timeout=60
    )
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_of_the_checkout(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"ddp_trainer/py.typed", "ddp_trainer/conf/config.yaml"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ddp_trainer", "hydra_plugins"}


def test_the_installed_wheel_trains_from_another_directory(wheel: Path, tmp_path: Path) -> None:
    """Its commands run in a new environment that holds the wheel; the packages that it needs are
    borrowed from ours.
    """
    venv.create(tmp_path / "env", symlinks=True)
    [packages] = (tmp_path / "env").glob("lib/python*/site-packages")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        f"{tmp_path}/env/bin/python",
        "install",
        "--quiet",
        "--no-deps",
    ]
    subprocess.run(
        [*pip, "--disable-pip-version-check", "--no-index", str(wheel)], check=True, timeout=60
    )
    # A path in a .pth file comes after the environment's own packages, and a .pth file in it is not
    # followed: the wheel wins, and the checkout, which is in ours as an editable install, is out of
    # reach.
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")

    def installed(command: str, *words: str) -> str:
        done = run_command([f"{tmp_path}/env/bin/{command}", *words], cwd=tmp_path, PYTHONPATH="")
        assert done.code == (2 if "--multirun" in words else 0), done.output
        return done.output

    where = installed(
        "python", "-c", "from ddp_trainer.config.composition import config_dir; print(config_dir())"
    )
    assert where == f"{packages.resolve()}/ddp_trainer/conf\n"
    launchers = ("hydra/launcher=torchrun", "hydra.launcher.max_parallel=0")
    error = installed("ddp-trainer", "--multirun", *launchers)
    assert error == "error: hydra.launcher.max_parallel=0 must be greater than 0\n"
    installed(
        "python", *torchrun(2)[1:], "-m", "ddp_trainer", "model=lenet", "max_steps=3", "name=run"
    )
    summary = read_summary(tmp_path / "outputs" / "run")
    assert (summary["steps"], summary["world_size"], summary["eval/count"]) == (3, 2, 355)


# --- what the papers say --------------------------------------------------------------------------


def fenced_lines(paper: Path) -> list[str]:
    """The lines of the fenced code blocks in `paper`, those that end in a backslash joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", paper.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def commands() -> list[str]:
    """Every command in the papers that starts ddp_trainer without choices of plug-ins."""
    examples = "".join(path.read_text() for path in (ROOT / "examples").glob("*.py"))
    found = []
    for paper in PAPERS:
        own = set(re.findall(r'register_\w+\("(\w+)"', paper.read_text() + examples))
        for line in fenced_lines(paper):
            is_command = re.search(r"-m ddp_trainer(?= |$)|^ddp-trainer |launch/local\.sh ", line)
            # has options of its own
            is_of_a_run = re.search(
                r"(ddp_trainer|local\.sh) (evaluate|predict|export|report|inspect) ", line
            )
            is_own = own & set(re.findall(r"=(\w+)", line))  # see test_plugins.py, test_examples.py
            if is_command and not is_of_a_run and not is_own:
                found.append(line)
    return found


def overrides_in(command: str) -> list[str]:
    words = shlex.split(command, comments=True)
    starts = ("ddp_trainer", "ddp-trainer", "launch/local.sh")
    words = words[next(words.index(word) for word in starts if word in words) + 1 :]
    sweepers = ("-", "hydra/sweeper", "hydra.sweeper")  # Optuna's comes with an extra
    return quote_texts([word for word in words if "=" in word and not word.startswith(sweepers)])


def jobs_of(overrides: list[str]) -> list[tuple[str, ...]]:
    """Expand ``a=1,2`` into one list of overrides a job."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    choices = []
    for override, word in zip(parsed, overrides, strict=True):
        if override.is_discrete_sweep():
            choices.append(
                [
                    f"{override.get_key_element()}={value}"
                    for value in override.sweep_string_iterator()
                ]
            )
        else:
            choices.append([re.sub(r"interval\((.+?),.*\)", r"\1", word)])
    return list(product(*choices))


def test_every_command_in_the_papers_composes() -> None:
    register_launchers()
    jobs = {job for command in commands() for job in jobs_of(overrides_in(command))}
    assert len(jobs) >= 5
    for job in jobs:
        compose(*job)


def test_papers_are_short_and_their_links_lead_to_files() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 60
    for paper in PAPERS:
        for target in re.findall(r"\]\(([^)#:]+)\)", paper.read_text()):
            assert (paper.parent / target).exists(), f"{paper.name} links to {target}"


def test_the_readme_names_every_choice_of_every_group() -> None:
    rows = dict(
        re.findall(r"^\| `(\w+)=` \| ([^|]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    )
    named = {group: set(re.findall(r"`(\w+)`", choices)) for group, choices in rows.items()}
    expected = {"experiment": {path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")}}
    for group in registry.GROUPS:
        schemas = {
            name: choice.schema.__module__ for name, choice in registry.choices(group).items()
        }
        expected[group] = {
            name for name, module in schemas.items() if module.startswith("ddp_trainer.")
        }
    assert named == expected


def test_the_changelog_begins_with_this_version_and_constraints_are_exact() -> None:
    versions = re.findall(
        r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert versions[0] == ddp_trainer.__version__.partition(".dev")[0]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)
    assert {"torch", "torchvision", "hydra-core"} <= {line.partition("==")[0] for line in lines}


# --- the page of the Python interface -------------------------------------------------------------


def api_section(title: str) -> str:
    text = (ROOT / "docs" / "api.md").read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_cells(text: str, header: str) -> set[str]:
    """Return the names, without arguments, in the first column of the table under `header`."""
    table = text.partition(f"| {header} |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}


def public_members(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_the_page_of_the_interface_has_each_public_name_and_no_other() -> None:
    named = re.findall(r"^\| `(\w+)` \|", api_section("Names"), re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) == set(ddp_trainer.__all__)


def test_the_signatures_on_the_page_of_the_interface_are_those_of_the_code() -> None:
    sections = api_section("Train and predict") + api_section("Register")
    shown = dict(re.findall(r"^def (\w+)(\(.*?\)): \.\.\.$", sections, re.MULTILINE))
    registers = [name for name in ddp_trainer.__all__ if name.startswith("register_")]
    assert set(shown) == {"launch", "run", "load", *registers}
    for name, signature in shown.items():
        actual = inspect.signature(getattr(ddp_trainer, name))
        plain = [one.replace(annotation=one.empty) for one in actual.parameters.values()]
        assert str(inspect.Signature(plain)).replace("'", '"') == signature


def test_the_page_of_the_interface_has_every_group_event_and_member() -> None:
    groups = first_cells(api_section("Register"), "group")
    assert groups == set(registry.GROUPS)
    observers = api_section("Observers")
    events = first_cells(observers, "method of `Observer`")
    assert events == public_members(ddp_trainer.Observer)
    loggers = first_cells(api_section("Loggers"), "method of `Logger`")
    assert loggers == public_members(ddp_trainer.Logger) - {"in_background"}
    members = first_cells(observers, "member of `TrainingRun`")
    set_in_constructor = re.findall(
        r"self\.(\w+)\b", inspect.getsource(ddp_trainer.TrainingRun.__init__)
    )
    assert members <= public_members(ddp_trainer.TrainingRun) | set(set_in_constructor)
    assert first_cells(api_section("Schemas"), "class variable") == public_class_variables(
        ddp_trainer.SyncConfig
    )


def public_class_variables(schema: type) -> set[str]:
    return {name for name, kind in schema.__annotations__.items() if "ClassVar" in str(kind)}


# --- CI -------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs Debian's shellcheck")
def test_shell_scripts_pass_shellcheck() -> None:
    folders = [ROOT / name for name in ("launch", "docs", "benchmarks", "examples")]
    scripts = [
        ROOT / ".ci" / "run",
        *(path for folder in folders for path in folder.rglob("*.s[hb]*")),
    ]
    done = run_command(["shellcheck", *map(str, scripts)])
    assert done.code == 0, done.output


def test_in_ci_a_skipped_test_fails_the_run_unless_it_needs_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_moon():\n    pytest.skip('the moon is full')\n"
        "@pytest.mark.gpu\ndef test_gpu():\n    pytest.skip('needs a GPU')\n"
    )
    words = [
        "-m",
        "pytest",
        "-q",
        "--assert=plain",  # or modules that are already imported are a warning
        "-c",
        str(ROOT / "pyproject.toml"),
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    done = run_forked(words, cwd=tmp_path, CI="true", PYTHONPATH=str(ROOT / "tests"))
    assert done.code == 1, done.output
    assert re.findall("^CI must not skip .*::(.*)", done.output, re.MULTILINE) == [
        "test_moon: Skipped: the moon is full"
    ]
    assert "1 failed, 1 skipped" in done.output
