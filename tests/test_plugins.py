"""Plug-ins: tests/plugin_example as a user would have it, and what a plug-in may get wrong."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    assert_bitwise,
    clean_environment,
    compose,
    in_process_group,
    launch,
    newest_checkpoint,
    on_ranks,
    read_summary,
    records,
    run_command,
    succeed,
    torchrun,
    trained_state,
)
from torch import nn

from ddp_trainer import (
    Config,
    ConfigError,
    DataConfig,
    Datasets,
    ImageTensors,
    LoggerConfig,
    ModelConfig,
    SyncConfig,
    register_dataset,
    register_model,
    registry,
    run,
)
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import USER_ERROR
from ddp_trainer.data.dataset import build_datasets
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.distributed.process_group import shutdown
from ddp_trainer.training.start import check_same_start

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tests" / "plugin_example"
GUIDE = ROOT / "docs" / "extending.md"
PLUGIN: dict[str, Any] = {"DDP_TRAINER_PLUGINS": "example_plugin", "PYTHONPATH": str(PACKAGE)}
CHOICES = {"model": "convmixer", "data": "shapes", "sync": "reduce_broadcast", "logger": "tag_files"}
"""The choices of the example, by group."""
EXAMPLE = (
    "model=convmixer", "data=shapes", "sync=reduce_broadcast", "logger=[tag_files,jsonl]", "global_batch_size=20",
    "data.augment.random_crop_padding=2", "checkpoint.every_steps=4", "num_threads=1", "epochs=3",
    "precision=fp32",
)  # fmt: skip
STEPS_PER_EPOCH = 300 // 20


# --- a run ----------------------------------------------------------------------------------------


def kill_in_mid_epoch(*overrides: str, run_dir: Path, log: Path) -> None:
    """Start two ranks by torchrun and kill all processes once there is a checkpoint inside of an epoch."""
    with log.open("w") as output:
        agent = subprocess.Popen(
            [*torchrun(2), "-m", "ddp_trainer", *overrides],
            env=clean_environment(**PLUGIN), stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + 120
    while not [path for path in run_dir.glob("checkpoints/step-*.pt") if int(path.stem[5:]) % STEPS_PER_EPOCH]:
        assert agent.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for pid in (agent.pid, *map(int, ranks)):
        os.kill(pid, signal.SIGKILL)
    agent.wait(timeout=30)


def tag_lines(run_dir: Path, tag: str) -> list[str]:
    return (run_dir / "tags" / f"{tag}.txt").read_text().splitlines()


def test_a_killed_run_of_plugins_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    whole, killed = ((*EXAMPLE, f"output_dir={tmp_path}", f"name={name}") for name in ("whole", "killed"))
    succeed(*whole, ranks=2, **PLUGIN)
    kill_in_mid_epoch(*killed, run_dir=tmp_path / "killed", log=tmp_path / "log")
    assert not (tmp_path / "killed" / "summary.json").exists()
    done = succeed(*killed, ranks=2, **PLUGIN)
    assert "resumed from" in done.output
    assert_bitwise(trained_state(tmp_path / "whole"), trained_state(tmp_path / "killed"))
    for tag in ("train-loss", "eval-top1", "samples-digest"):
        assert tag_lines(tmp_path / "whole", tag) == tag_lines(tmp_path / "killed", tag)
    assert "example_plugin" in json.loads((tmp_path / "killed" / "versions.json").read_text())

    longer = succeed(*killed, "epochs=4", ranks=3, **PLUGIN)
    assert "3 × cpu" in longer.output
    summary = read_summary(tmp_path / "killed")
    assert (summary["world_size"], summary["eval/count"], summary["sync"]) == (3, 61, "reduce_broadcast")
    assert [record["samples/count"] for record in records(tmp_path / "killed", "samples/count")] == [300] * 4


def test_an_installed_plugin_is_found_and_its_version_recorded(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps",
           "--no-build-isolation", "--target", str(tmp_path / "site"), str(PACKAGE)]  # fmt: skip
    done = run_command(pip)
    assert done.code == 0, done.output
    [command] = re.findall(r"-m ddp_trainer (.+data=shapes.+)", GUIDE.read_text().replace("\\\n", " "))
    words = (*shlex.split(command), "max_steps=2", f"output_dir={tmp_path}", "name=run")
    succeed(*words, PYTHONPATH=str(tmp_path / "site"), DDP_TRAINER_PLUGINS="example_plugin")  # named twice: once
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["example_plugin"] == "1.0"


def test_a_job_file_and_a_sweep_have_the_choices_of_plugins(tmp_path: Path) -> None:
    job, run_dir = tmp_path / "job.json", tmp_path / "frozen"
    words = (*EXAMPLE, "max_steps=2", f"output_dir={tmp_path}")
    frozen = succeed("freeze", str(job), "world_size=2", *words, "name=frozen", **PLUGIN)
    assert frozen.output == f"{run_dir}\n"
    succeed("train", f"job_file={job}", ranks=2, **PLUGIN)
    assert read_summary(run_dir)["steps"] == 2
    succeed("--multirun", *words, "name=sweep", "sync=ddp,reduce_broadcast", ranks=2, **PLUGIN)
    jobs = list((tmp_path / "sweep").iterdir())
    first, second = (newest_checkpoint(job)["model"] for job in jobs if job.is_dir())
    torch.testing.assert_close(first, second)
    assert "ok" in succeed("verify", str(run_dir), **PLUGIN).output
    unknown = launch("train", f"job_file={job}")
    assert (unknown.code, unknown.output) == (
        USER_ERROR, "error: model=convmixer is unknown here: is its plug-in installed?\n",
    )  # fmt: skip


def test_the_benchmark_compares_the_strategy_of_a_plugin(tmp_path: Path) -> None:
    options = ("strategies=allreduce,reduce_broadcast", "rounds=1", "steps=2")
    succeed("benchmark", *options, *EXAMPLE, f"output_dir={tmp_path}", "name=run", ranks=2, **PLUGIN)
    result = json.loads((tmp_path / "benchmark-run" / "benchmark.json").read_text())
    assert [row["name"] for row in result["rows"]][-1] == "reduce_broadcast"


# --- what a user sees -----------------------------------------------------------------------------


@pytest.fixture
def before_torch(without_torch: dict[str, str]) -> dict[str, Any]:
    """Return the environment of the example plug-in, in which importing torch fails."""
    return PLUGIN | {"PYTHONPATH": f"{without_torch['PYTHONPATH']}{os.pathsep}{PACKAGE}"}


def test_help_lists_the_choices_and_keys_of_plugins(before_torch: dict[str, Any]) -> None:
    overview, keys = succeed("--help", **before_torch).output, succeed("train", "--help", **before_torch).output
    for group, name in CHOICES.items():
        [line] = [line for line in overview.splitlines() if line.startswith(f"  {group} ")]
        assert line.endswith(f", {name}")
        assert f"\n{group}={name}\n" in keys
    assert re.search(r"^  model\.patch_size=2 +Side of the patches that ", keys, re.MULTILINE)


@pytest.mark.parametrize(("group", "name"), CHOICES.items())
def test_completion_and_error_messages_offer_the_choices_of_plugins(
    group: str, name: str, before_torch: dict[str, Any]
) -> None:
    done = succeed("-sc", "query=bash", COMP_LINE=f"ddp-trainer {group}={name[:3]}", **before_torch)
    assert done.output.split() == [f"{group}={name}"]
    wrong = launch(f"{group}={name}s", **before_torch)
    assert wrong.code == USER_ERROR
    assert wrong.output.startswith(f"error: {group}={name}s is not a valid choice: choose from ")
    assert wrong.output.endswith(f"(did you mean {name}?)\n")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.size=4", "data.size=4 must be at least 8 pixels"),
        ("data.size=x", "data.size=x must be a whole number"),
        ("data.sise=9", "data.sise=9 is unknown: did you mean data.size?"),
    ],
)
def test_the_keys_of_plugins_are_checked(override: str, message: str, before_torch: dict[str, Any]) -> None:
    done = launch("data=shapes", override, **before_torch)
    assert (done.code, done.output) == (USER_ERROR, f"error: {message}\n")


# --- a plug-in that cannot be loaded ----------------------------------------------------------------

BAD_PLUGINS = {
    "raise OSError('no\\nlicence')": "OSError: no licence",
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "@dataclass\nclass A(ModelConfig):\n    width: int = 1": "ValueError: A must be a dataclass with the ",
    "@dataclass\nclass A:\n    name: str = 'mine'": "ValueError: A must be a subclass of ModelConfig",
    "@dataclass\nclass A(ModelConfig):\n    name: str = 'mine'\n    kind: set = 0": "ValueError: A.kind is not a type ",
}


@pytest.mark.parametrize("code", BAD_PLUGINS)
def test_a_plugin_that_cannot_be_loaded_is_one_line_that_names_it(
    code: str, tmp_path: Path, without_torch: dict[str, str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom ddp_trainer import ModelConfig, register_model\n"
        f"{code}\nregister_model('mine', A, builder='mine:build')\n"
    )
    path = f"{without_torch['PYTHONPATH']}{os.pathsep}{tmp_path}"
    done = launch("--cfg", "job", DDP_TRAINER_PLUGINS="mine", PYTHONPATH=path)
    assert done.code == USER_ERROR
    assert done.output.startswith(f"error: plug-in mine cannot be imported ({BAD_PLUGINS[code]}")
    assert done.output.endswith("correct or uninstall it, or take it out of DDP_TRAINER_PLUGINS\n")
    assert done.output.count("\n") == 1


def test_a_plugin_that_is_missing_is_one_line_that_names_it() -> None:
    done = launch("--help", DDP_TRAINER_PLUGINS="no_such_plugin")
    assert (done.code, done.output.count("\n")) == (USER_ERROR, 1)
    assert done.output.startswith("error: plug-in no_such_plugin cannot be imported (ModuleNotFoundError: ")


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget after the test what it registers."""
    monkeypatch.setattr(registry, "_choices", {group: dict(registry.choices(group)) for group in registry.groups()})


@dataclass
class MineConfig(DataConfig):
    name: str = "mine"


@pytest.mark.usefixtures("own_registry")
def test_a_name_is_registered_once() -> None:
    @dataclass
    class OtherConfig(DataConfig):
        name: str = "mine"

    register_dataset("mine", MineConfig, builder="mine:build")
    register_dataset("mine", MineConfig, builder="mine:build_better")  # a module that is imported again
    with pytest.raises(ValueError, match=r"^data=mine is already registered, by test_plugins$"):
        register_dataset("mine", OtherConfig, builder="other:build")


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(("name", "builder"), [("my model", "a:b"), ("mine", "no_function"), ("mine", "a:b:c")])
def test_names_and_builders_that_cannot_work_are_refused(name: str, builder: str) -> None:
    schema = make_dataclass("MineConfig", [("name", str, name)], bases=(ModelConfig,))
    with pytest.raises(ValueError, match=f"model={name} "):
        register_model(name, schema, builder=builder)


def versions_differ(folder: str, plugin: str) -> str:
    """Compare the ranks, of which each has another version of the plug-in."""
    rank = read_environment().rank
    (Path(folder) / str(rank) / plugin).mkdir(parents=True)
    (Path(folder) / str(rank) / plugin / "__init__.py").touch()
    (Path(folder) / str(rank) / plugin / "model.py").write_text(f"# of rank {rank}\n")
    sys.path.insert(0, f"{folder}/{rank}")
    registry.load_plugins([plugin])
    try:
        with in_process_group(config := compose()) as world:
            check_same_start(to_builtins(config), world)
    except ConfigError as error:
        shutdown()
        return str(error)
    return ""


def test_versions_of_plugins_are_compared_over_ranks(tmp_path: Path) -> None:
    first, second = on_ranks(2, versions_differ, str(tmp_path), "mine")
    assert first == second
    assert re.match(r"rank 1 was started with .*\(plug-in mine: sha256:\w+ → sha256:\w+\)", first), first


# --- what builders must return ----------------------------------------------------------------------

IMAGES, LABELS = torch.zeros(6, 1, 8, 8, dtype=torch.uint8), torch.arange(6) % 3
GOOD = ImageTensors(IMAGES, LABELS)
FLOATS = [(image / 255, 0) for image in IMAGES]


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    ("train", "evaluation", "message"),
    [
        (ImageTensors(IMAGES.float(), LABELS), GOOD, "images must be uint8 [N, C, H, W] and are torch.float32 [6, 1, "),
        (ImageTensors(IMAGES[0], LABELS), GOOD, "images must be uint8 [N, C, H, W] and are torch.uint8 [1, 8, 8]"),
        (GOOD, ImageTensors(IMAGES, LABELS[:5]), "labels must be int64 [6] and are torch.int64 [5]"),
        (ImageTensors(IMAGES, LABELS + 1), GOOD, "labels must be 0 to 2 and are 1 to 3"),
        (GOOD, ImageTensors(IMAGES[:0], LABELS[:0]), "eval has no sample"),
        (iter([]), GOOD, "train must be ImageTensors or a map-style data set, and has no length"),
        (GOOD, ImageTensors(IMAGES[..., :6], LABELS), "images must have one shape: train has (1, 8, 8) and eval (1, 8"),
        (FLOATS, GOOD, "sample 0 of list must be a uint8 tensor [C, H, W] or a PIL image and is torch.float32 [1, 8"),
    ],
)
def test_splits_that_do_not_fit_are_one_error(train: Any, evaluation: Any, message: str) -> None:
    datasets = Datasets(train=train, eval=evaluation, class_names=["a", "b", "c"])
    register_dataset("mine", MineConfig, builder=lambda config: datasets)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'data=mine: {message}')}"):
        build_datasets(MineConfig())


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    ("group", "base", "returns"),
    [("model", ModelConfig, "Module"), ("data", DataConfig, "Datasets"), ("sync", SyncConfig, "GradientSync"),
     ("logger", LoggerConfig, "Logger")],
)  # fmt: skip
def test_a_builder_that_returns_something_else_is_one_error(
    group: str, base: type, returns: str, tmp_path: Path
) -> None:
    schema = make_dataclass("MineConfig", [("name", str, "mine")], bases=(base,))
    registry.register(group, "mine", schema, builder=lambda config, *args, **options: None)
    chosen: Any = {group: {"mine": schema()} if group == "logger" else schema()}
    config = Config(output_dir=str(tmp_path), **chosen)
    message = f"^{group}=mine: the builder must return an object of {returns} and returns one of NoneType$"
    with pytest.raises(registry.PluginError, match=message):
        run(config)
    shutdown()


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("num_outputs", [9, 11])
def test_a_model_with_another_number_of_classes_is_one_error(num_outputs: int, tmp_path: Path) -> None:
    @dataclass
    class LinearConfig(ModelConfig):
        name: str = "linear"

    @register_model("linear", LinearConfig)
    def build(config: LinearConfig, *, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(image_shape), num_outputs))

    with pytest.raises(ConfigError, match=r"^model=linear must return logits \[images, classes\], which is \[2, 10\] "):
        run(Config(output_dir=str(tmp_path), model=LinearConfig()))
    shutdown()


# --- what the papers show ---------------------------------------------------------------------------


def test_the_guide_shows_the_files_of_the_example() -> None:
    blocks = re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".toml")]
    assert dict(blocks) == {str(path.relative_to(PACKAGE)): path.read_text() for path in files}


def test_the_model_of_the_readme_trains(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("## Your own model")[2]
    [code] = re.findall(r"^```python\n(.*?)^```", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    (tmp_path / "tiny.py").write_text(code)
    done = succeed("model=tiny", "model.width=128", "max_steps=1", cwd=tmp_path, DDP_TRAINER_PLUGINS="tiny")
    assert "tiny (" in done.output


# --- one more choice, and nothing else changes ------------------------------------------------------


def test_a_model_is_added_to_the_package_in_two_files(tmp_path: Path) -> None:
    """Add the example's model to a copy of the package: its file, and a schema with its registration."""
    shutil.copytree(ROOT / "ddp_trainer", tmp_path / "ddp_trainer", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    text = (PACKAGE / "example_plugin" / "convmixer.py").read_text()
    text = text.replace("from example_plugin import", "from ddp_trainer.config.models import")
    (tmp_path / "ddp_trainer" / "models" / "convmixer.py").write_text(text)
    with (tmp_path / "ddp_trainer" / "config" / "models.py").open("a") as file:
        file.write("""

@dataclass(kw_only=True, slots=True)
class ConvMixerConfig(ModelConfig):
    name: str = "convmixer"
    width: int = 16
    depth: int = 2
    patch_size: int = 2


register_model("convmixer", ConvMixerConfig, builder="ddp_trainer.models.convmixer:build_convmixer")
""")
    done = succeed("model=convmixer", "data=digits", "max_steps=1", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "convmixer (" in done.output
    assert read_summary(tmp_path / "outputs" / "digits-convmixer-ddp")["steps"] == 1


def test_existing_tests_hold_with_the_choices_of_plugins() -> None:
    """Run the tests that see all choices of a group in a process that has loaded the example."""
    tests = [
        "config/test_config.py",
        "test_bad_input.py::test_a_bad_argument_is_named_with_its_rule",
        "commands/test_train.py::test_help_lists_the_commands_and_the_choices_of_each_group",
        "commands/test_train.py::test_completion_offers_choices_and_keys",
    ]
    pytest_command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    done = run_command([*pytest_command, *tests], cwd=ROOT / "tests", deadline=240, **PLUGIN)
    assert done.code == 0, done.output
    for group, name in CHOICES.items():
        assert f"[{group}-{name}] PASSED" in done.output  # the parametrized lists come from the registry
