"""The project's shell: the wheel, what the papers say about the code, and what CI holds."""

import re
import shlex
import shutil
import site
import subprocess
import sys
import tarfile
import venv
from itertools import product
from pathlib import Path

import pytest
from conftest import Finished, compose, read_summary, run_command
from hydra.core.override_parser.overrides_parser import OverridesParser

import ddp_trainer
from ddp_trainer import registry
from ddp_trainer.launch.launchers import register_launchers

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
    subprocess.run([*build, "wheel"], cwd=folder / archive.name.removesuffix(".tar.gz"), check=True, timeout=60)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment that holds the wheel; what it depends on is borrowed from ours."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet",
         "--disable-pip-version-check", "--no-deps", "--no-index", str(wheel)],
        check=True, timeout=60,
    )  # fmt: skip
    # A path in a .pth file comes after the environment's own packages, and a .pth file in it is not followed:
    # the wheel wins, and the checkout, which is in ours as an editable install, is out of reach.
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return folder / "bin"


def in_wheel(installed: Path, *command: str, cwd: Path, deadline: float = 120) -> Finished:
    return run_command([str(installed / command[0]), *command[1:]], cwd=cwd, deadline=deadline, PYTHONPATH="")


def test_the_wheel_trains_digits_from_another_directory(installed: Path, tmp_path: Path) -> None:
    done = in_wheel(installed, "python", "-m", "torch.distributed.run", "--master-port=29511", "--nproc_per_node=2",
                    "-m", "ddp_trainer", "model=lenet", "epochs=1", "max_steps=3", "name=run",
                    cwd=tmp_path)  # fmt: skip
    assert done.code == 0, done.output
    summary = read_summary(tmp_path / "outputs" / "run")
    assert (summary["steps"], summary["world_size"], summary["eval/count"]) == (3, 2, 355)


def test_the_wheel_brings_its_groups_and_its_command(installed: Path, tmp_path: Path) -> None:
    where = in_wheel(
        installed,
        "python",
        "-c",
        "from ddp_trainer.config.composition import config_dir; print(config_dir())",
        cwd=tmp_path,
    )
    assert Path(where.output.strip()).is_relative_to(installed.parent.resolve())
    done = in_wheel(installed, "ddp-trainer", "--cfg", "job", "experiment=digits_resnet18", cwd=tmp_path)
    assert done.code == 0, done.output
    assert "name: resnet18" in done.output


def test_the_wheel_brings_its_launchers(installed: Path, tmp_path: Path) -> None:
    done = in_wheel(installed, "ddp-trainer", "--multirun", "hydra/launcher=torchrun", "hydra.launcher.max_parallel=0",
                    cwd=tmp_path)  # fmt: skip
    assert done.output == "error: hydra.launcher.max_parallel=0 must be greater than 0\n"


def test_the_wheel_holds_the_package_and_nothing_of_the_checkout(wheel: Path) -> None:
    listing = subprocess.run(
        [sys.executable, "-m", "zipfile", "--list", str(wheel)], capture_output=True, text=True, check=True
    )
    names = {line.split()[0] for line in listing.stdout.splitlines()[1:]}
    assert {"ddp_trainer/py.typed", "ddp_trainer/conf/config.yaml"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ddp_trainer", "hydra_plugins"}


# --- what the papers say --------------------------------------------------------------------------


def fenced_lines(paper: Path) -> list[str]:
    """The lines of the fenced code blocks in `paper`, those that end in a backslash joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", paper.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def commands() -> list[str]:
    """Every command in the papers that starts ddp_trainer without the choices that the same paper registers."""
    found = []
    for paper in PAPERS:
        own = set(re.findall(r'register_\w+\("(\w+)"', paper.read_text()))
        for line in fenced_lines(paper):
            is_command = re.search(r"-m ddp_trainer(?= |$)|^ddp-trainer ", line)
            if is_command and not own & set(re.findall(r"=(\w+)", line)):  # those are in test_plugins.py
                found.append(line)
    return found


def overrides_in(command: str) -> list[str]:
    words = shlex.split(command, comments=True)
    words = words[words.index("ddp_trainer" if "ddp_trainer" in words else "ddp-trainer") + 1 :]
    sweepers = ("-", "hydra/sweeper", "hydra.sweeper")  # Optuna's comes with an extra
    return [word for word in words if "=" in word and not word.startswith(sweepers)]


def jobs_of(overrides: list[str]) -> list[tuple[str, ...]]:
    """Expand ``a=1,2`` into one list of overrides a job."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    choices = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_discrete_sweep()
        else [f"{override.get_key_element()}={override.value().start}"]  # type: ignore[union-attr]
        if override.is_interval_sweep()
        else [text]
        for override, text in zip(parsed, overrides, strict=True)
    ]
    return list(product(*choices))


@pytest.mark.parametrize("command", commands())
def test_every_command_in_the_papers_composes(command: str) -> None:
    register_launchers()
    for job in jobs_of(overrides_in(command)):
        compose(*job)


def test_the_papers_show_commands() -> None:
    assert len(commands()) >= 5


def test_papers_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 60


def test_links_in_the_papers_lead_to_files() -> None:
    for paper in PAPERS:
        for target in re.findall(r"\]\(([^)#:]+)\)", paper.read_text()):
            assert (paper.parent / target).exists(), f"{paper.name} links to {target}"


def test_the_readme_names_every_choice_of_every_group() -> None:
    rows = dict(re.findall(r"^\| `(\w+)=` \| ([^|]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    named = {group: set(re.findall(r"`(\w+)`", choices)) for group, choices in rows.items()}
    expected = {
        group: {
            name
            for name, choice in registry.choices(group).items()
            if choice.schema.__module__.startswith("ddp_trainer.")
        }
        for group in registry.groups()
    }
    experiments = {path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")}
    assert named == expected | {"experiment": experiments}


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == ddp_trainer.__version__


def test_constraints_hold_names_and_exact_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)
    assert {"torch==2.14.1", "torchvision==0.29.1"} <= set(lines)


# --- CI -------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs Debian's shellcheck")
def test_shell_scripts_pass_shellcheck() -> None:
    folders = [ROOT / name for name in ("launch", "docs", "benchmarks")]
    scripts = [ROOT / ".ci" / "run", *(path for folder in folders for path in folder.rglob("*.s[hb]*"))]
    done = run_command(["shellcheck", *map(str, scripts)])
    assert done.code == 0, done.output


def test_in_ci_a_skipped_test_fails_the_run_unless_it_needs_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_moon():\n    pytest.skip('the moon is full')\n"
        "@pytest.mark.gpu\ndef test_gpu():\n    pytest.skip('needs a GPU')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "-p", "conftest",
               "-p", "no:cacheprovider", str(tmp_path)]  # fmt: skip
    done = run_command(command, cwd=tmp_path, CI="true", PYTHONPATH=str(ROOT / "tests"))
    assert done.code == 1, done.output
    assert re.findall("CI must not skip .*::(.*)", done.output) == ["test_moon: Skipped: the moon is full"]
