"""The image, built and run for real: by buildah, on a Debian made here, as no registry need be in
reach.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import Finished, run_command

ROOT = Path(__file__).resolve().parents[2]
SITE_PACKAGES = "/opt/venv/lib/python3.11/site-packages"
TWO_RANKS = ("--master-port=29511", "--nproc_per_node=2", "-m", "ddp_trainer")
IN_PIP_CONF = "nobody-else-reads-this"
"""A word that only the secret of the build holds."""
STORE_GB = 30
HUGE = ("nvidia", "torch/lib", "triton")
"""Folders with 5 of the 7 GB of the image. They are installed beside it, because buildah reads all
that it stores several times, which takes longer than the rest of the build.
"""
BUSY = "sealing memfd copy: Device or resource busy"
"""What buildah says when Linux refuses it, on a busy machine and before anything has run, to seal
its copy of itself: fcntl(2), F_SEAL_WRITE. The way out is to start it again.
"""

lacking = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(lacking), reason=f"needs Debian's {' and '.join(lacking)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 11),
        reason="needs Python 3.11, for which the image's wheels are",
    ),
]


@dataclass(frozen=True)
class Buildah:
    """buildah with all that it stores in one folder. It takes overlayfs where it can, else copies
    (its vfs).
    """

    folder: Path

    def command(self, *arguments: str) -> list[str]:
        return [
            "buildah",
            "--root",
            str(self.folder / "root"),
            "--runroot",
            str(self.folder / "run"),
            *arguments,
        ]

    @property
    def volumes(self) -> list[str]:
        """The options that install `HUGE` beside the image, and let a container find it there."""
        options = []
        for name in HUGE:
            folder = self.folder / "huge" / name
            folder.mkdir(parents=True, exist_ok=True)
            options += ["--volume", f"{folder}:{SITE_PACKAGES}/{name}"]
        return options

    def try_to(self, *arguments: str, deadline: float = 120, tries: int = 5) -> Finished:
        where = {"BUILDAH_ISOLATION": "chroot", "TMPDIR": str(self.folder)}
        done = run_command(self.command(*arguments), cwd=ROOT, deadline=deadline, **where)
        if done.code != 0 and BUSY in done.output and tries > 1:
            return self.try_to(*arguments, deadline=deadline, tries=tries - 1)
        return done

    def __call__(self, *arguments: str, deadline: float = 120) -> str:
        done = self.try_to(*arguments, deadline=deadline)
        assert done.code == 0, done.output
        return done.output.strip()


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """An empty store. It grows to `STORE_GB`, and goes with the last test."""
    folder = tmp_path_factory.mktemp("buildah")
    free = shutil.disk_usage(folder).free / 1e9
    assert free > STORE_GB, f"{folder} has {free:.0f} GB left, and the image needs {STORE_GB}"
    buildah = Buildah(folder)
    try:
        yield buildah
    finally:
        buildah.try_to("rm", "--all", deadline=300)
        for mounted in reversed(
            [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        ):
            if Path(mounted).is_relative_to(folder):  # of a build that was cut short
                subprocess.run(["umount", "--lazy", mounted], check=True)
        subprocess.run(
            ["rm", "--recursive", "--force", "--one-file-system", str(folder)], check=True
        )


@pytest.fixture(scope="module")
def bare(buildah: Buildah) -> str:
    """An image of Debian 12 at its smallest, without Python."""
    buildah("from", "--name", "bare", "scratch")
    root = Path(buildah("mount", "bare"))
    done = run_command(["debootstrap", "--variant=minbase", "bookworm", str(root)], deadline=600)
    assert done.code == 0, done.output
    for leftover in [
        *root.glob("var/lib/apt/lists/*_*"),
        *root.glob("var/cache/apt/archives/*.deb"),
    ]:
        leftover.unlink()
    buildah("commit", "--rm", "bare", "bare")
    return "localhost/bare"


@pytest.fixture(scope="module")
def with_python(buildah: Buildah, bare: str) -> str:
    """Build the Dockerfile on a base without Python; a build on its result is the case of a base
    with Python.
    """
    build = [
        "bud",
        "--pull-never",
        "--target",
        "base",
        "--build-arg",
        f"BASE={bare}",
        "--tag",
        "with_python",
        ".",
    ]
    buildah(*build, deadline=600)
    return "localhost/with_python"


@pytest.fixture(scope="module")
def wheels(buildah: Buildah) -> Path:
    """All that the image installs: fetched out here, where pip knows its index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = project["project"]["dependencies"] + project["build-system"]["requires"]
    folder = buildah.folder / "wheels"
    done = run_command(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(folder), *needed],
        deadline=900,
        PIP_CONSTRAINT=str(ROOT / "constraints.txt"),
    )
    assert done.code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def image(buildah: Buildah, with_python: str, wheels: Path) -> str:
    pip_conf = buildah.folder / "pip.conf"
    pip_conf.write_text(f"# {IN_PIP_CONF}\n[global]\nno-index = true\nfind-links = /wheels\n")
    buildah(
        "bud",
        "--pull-never",
        "--build-arg",
        f"BASE={with_python}",
        "--secret",
        f"id=pip.conf,src={pip_conf}",
        "--volume",
        f"{wheels}:/wheels:ro",
        *buildah.volumes,
        "--tag",
        "image",
        ".",
        deadline=1800,
    )
    shutil.rmtree(wheels)
    return "localhost/image"


@dataclass(frozen=True)
class Container:
    """Start, in one container after another, what `docker run` would start."""

    buildah: Buildah
    entry: list[str]

    @property
    def options(self) -> list[str]:
        """docker writes the container's name into its /etc/hosts; buildah's chroot does not, and
        torchrun looks it up.
        """
        return ["--hostname", "localhost", *self.buildah.volumes]

    def docker_run(self, *arguments: str, deadline: float = 300) -> Finished:
        return self.buildah.try_to(
            "run", *self.options, "container", "--", *self.entry, *arguments, deadline=deadline
        )

    def shell(self, script: str, *options: str) -> str:
        return self.buildah("run", *options, "container", "--", "sh", "-c", script)


@pytest.fixture(scope="module")
def container(buildah: Buildah, image: str) -> Container:
    buildah("from", "--pull-never", "--name", "container", image, deadline=600)
    config = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]
    return Container(buildah, config["Entrypoint"])


def test_the_context_is_what_the_wheel_needs(buildah: Buildah) -> None:
    (buildah.folder / "Everything").write_text("FROM scratch\nCOPY . /\n")
    buildah(
        "bud",
        "--file",
        str(buildah.folder / "Everything"),
        "--ignorefile",
        ".dockerignore",
        "--tag",
        "all",
        ".",
    )
    buildah("from", "--name", "all", "localhost/all")
    sent = Path(buildah("mount", "all"))
    assert {path.name for path in sent.iterdir()} == {
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "LICENSE",
        "ddp_trainer",
        "conf",
        "launch",
    }
    assert not list(sent.rglob("__pycache__"))
    buildah("rm", "all")


def test_a_base_without_python_gets_one_and_keeps_no_lists(
    buildah: Buildah, with_python: str
) -> None:
    buildah("from", "--name", "base", with_python)
    root = Path(buildah("mount", "base"))
    assert (root / "usr/bin/python3").exists()
    assert not list(root.glob("var/lib/apt/lists/*_*"))
    assert not list(root.glob("var/cache/apt/archives/*.deb"))
    buildah("rm", "base")


def test_the_main_job_runs_as_a_user_who_is_not_root(container: Container) -> None:
    done = container.docker_run(
        *TWO_RANKS, "experiment=digits_resnet18", "max_steps=3", "name=main"
    )
    assert done.code == 0, done.output
    summary = json.loads(container.shell("cat outputs/main/summary.json"))
    assert (summary["steps"], summary["world_size"], summary["eval/count"]) == (3, 2, 355)
    assert container.shell("id -u; stat --format=%u outputs/main/summary.json").split() == [
        "10001",
        "10001",
    ]


def test_the_environment_is_what_the_constraints_say(container: Container) -> None:
    listing = (
        "from importlib.metadata import distributions as d;"
        ' print(*(f"{x.name.lower()}=={x.version}" for x in d()))'
    )
    installed = set(container.shell(f"python -c '{listing}'").split())
    pinned = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").split()
    ours = {pin for pin in installed if pin.startswith("ddp_trainer==")}
    assert len(ours) == 1
    assert {pin.replace("_", "-") for pin in installed - ours} <= set(pinned)


def test_the_last_stage_holds_no_build_tools_caches_or_secrets(container: Container) -> None:
    assert container.shell("for tool in gcc cc g++ make pip; do command -v $tool; done; true") == ""
    left = (
        "find /root /home /src /opt/pip /var/lib/apt/lists /var/cache/apt/archives -type f -size +0"
    )
    found = container.shell(f"{left} 2>/dev/null; true", "--user", "root").split()
    assert {Path(path).name for path in found} <= {".bashrc", ".profile", ".bash_logout"}
    search = (
        f"grep -rlF {IN_PIP_CONF} / --exclude-dir=proc --exclude-dir=sys --exclude-dir=dev"
        " --exclude-dir=nvidia"
    )
    assert container.shell(f"{search} --exclude-dir=torch; true", "--user", "root") == ""
    assert IN_PIP_CONF not in container.buildah("inspect", "--type", "image", "localhost/image")


@pytest.mark.parametrize("folder", ["conf", "launch"])
def test_the_installed_package_brings(folder: str, container: Container) -> None:
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert ours
    command = f"cd {SITE_PACKAGES}/ddp_trainer && find {folder} -type f -not -name '*.py*'"
    assert set(container.shell(command).split()) == ours


def first_of_its_namespace(ancestor: int) -> int | None:
    """Return the process that is PID 1 of a namespace below `ancestor`'s, seen from here, once it
    is torchrun.
    """
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status = dict(
                line.split(":\t", 1)
                for line in (path / "status").read_text().splitlines()
                if ":\t" in line
            )
            torchrun = b"torchrun" in (path / "cmdline").read_bytes()
            if (
                torchrun
                and status["NSpid"].split()[1:] == ["1"]
                and ancestor in ancestors(int(path.name))
            ):
                return int(path.name)
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
    return None


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def test_docker_stop_stops_softly_and_any_user_will_do(container: Container) -> None:
    """As docker does it: torchrun is PID 1 of its namespace, 4242 a user unknown to the image, and
    TERM comes.
    """
    as_docker = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "setpriv",
        "--reuid=4242",
        "--regid=4242",
        "--clear-groups",
    ]
    job = [*TWO_RANKS, "model=lenet", "epochs=1000000", "name=stop"]
    command = container.buildah.command(
        "run",
        *container.options,
        "--isolation",
        "chroot",
        "--user",
        "root",
        "--cap-add",
        "CAP_SYS_ADMIN",
        "container",
        "--",
        *as_docker,
        *container.entry,
        *job,
    )
    log = container.buildah.folder / "stop.log"

    def start() -> subprocess.Popen[bytes]:
        with log.open("w") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    process = start()
    first = None
    try:
        deadline = time.monotonic() + 300
        while "epoch 2/" not in log.read_text():
            if process.poll() is not None and BUSY in log.read_text():
                process = start()
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        first = first_of_its_namespace(process.pid)
        assert first is not None
        os.kill(first, signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            if first is not None:
                os.kill(first, signal.SIGKILL)  # and with it all of its namespace
    assert "not finished: the same command resumes it" in log.read_text()
    assert container.shell(
        "cd outputs/stop; stat --format='%n %u' stopped checkpoints"
    ).split() == [
        "stopped",
        "4242",
        "checkpoints",
        "4242",
    ]
    assert json.loads(container.shell("cat outputs/stop/summary.json"))["status"] == "stopped"
