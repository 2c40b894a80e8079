"""Plug-ins: tests/plugin_example as a user would have it, and what a plug-in may get wrong."""

import json
import math
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import (
    launch,
    on_ranks,
    run_command,
    run_forked,
    start_ranks,
    succeed,
    wait_for,
)
from runs import (
    assert_bitwise,
    compose,
    newest_checkpoint,
    newest_step,
    read_summary,
    records,
    trained_state,
)
from torch import nn
from torch.utils.data import Dataset

import ddp_trainer
from ddp_trainer import (
    Config,
    ConfigError,
    DataConfig,
    Datasets,
    ImageTensors,
    LoggerConfig,
    LossConfig,
    MetricConfig,
    ModelConfig,
    ObserverConfig,
    OptimizerConfig,
    SchedulerConfig,
    SyncConfig,
    register_dataset,
    register_logger,
    register_model,
    registry,
    run,
)
from ddp_trainer.config.composition import from_builtins, to_builtins, training_changes
from ddp_trainer.config.errors import USER_ERROR
from ddp_trainer.config.messages import format_config_error
from ddp_trainer.config.plugins import load_plugins
from ddp_trainer.data.build import build_datasets
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.distributed.process_group import shutdown

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tests" / "plugin_example"
GUIDE = ROOT / "docs" / "extending.md"
PLUGIN: dict[str, Any] = {
    "DDP_TRAINER_PLUGINS": "example_plugin",
    "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(ROOT)]),
}
CHOICES = {
    "model": "convmixer",
    "data": "shapes",
    "sync": "reduce_broadcast",
    "logger": "tag_files",
}
"""The choices of the example, by group."""
EXAMPLE = (
    "model=convmixer",
    "data=shapes",
    "sync=reduce_broadcast",
    "logger=[tag_files,jsonl]",
    "global_batch_size=20",
    "data.augment.random_crop_padding=2",
    "checkpoint.every_steps=4",
    "num_threads=1",
    "epochs=2",
    "precision=fp32",
)
STEPS_PER_EPOCH = 300 // 20


# --- a run ----------------------------------------------------------------------------------------


def train_example(*overrides: str) -> None:
    """Train as one rank of a process that has loaded the example."""
    sys.path.insert(0, str(PACKAGE))
    load_plugins(["example_plugin"])
    run(compose(*EXAMPLE, *overrides))


REQUIRED = """
from dataclasses import dataclass

from ddp_trainer import ModelConfig, register_model


@dataclass(kw_only=True)
class WideConfig(ModelConfig):
    name: str = "wide"
    width: int
    \"\"\"Number of units.\"\"\"


@register_model("wide", WideConfig)
def build_wide(config, *, image_shape, num_classes):
    raise NotImplementedError
"""


@pytest.mark.fault("SIGKILL of a run with own parts")
def test_a_killed_run_of_plugins_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    whole, killed = (tmp_path / name for name in ("whole", "killed"))
    on_ranks(2, train_example, f"output_dir={tmp_path}", "name=whole")
    ranks = start_ranks(2, train_example, f"output_dir={tmp_path}", "name=killed")
    wait_for(lambda: newest_step(killed) % STEPS_PER_EPOCH)  # a checkpoint inside of an epoch
    for rank in ranks:
        rank.kill()
        rank.join()
    assert not (killed / "summary.json").exists()
    on_ranks(2, train_example, f"output_dir={tmp_path}", "name=killed")
    assert "resumed from" in (killed / "train.log").read_text()
    assert_bitwise(trained_state(whole), trained_state(killed))
    for tag in ("train-loss", "eval-top1", "samples-digest"):
        assert (
            len({(run_dir / "tags" / f"{tag}.txt").read_text() for run_dir in (whole, killed)}) == 1
        ), tag
    assert "example_plugin" in json.loads((killed / "versions.json").read_text())

    on_ranks(3, train_example, f"output_dir={tmp_path}", "name=killed", "epochs=3")
    summary = read_summary(killed)
    assert (summary["world_size"], summary["eval/count"], summary["sync"]) == (
        3,
        61,
        "reduce_broadcast",
    )
    assert [record["samples/count"] for record in records(killed, "samples/count")] == [300] * 3


def test_an_installed_plugin_is_found_and_its_version_recorded(tmp_path: Path) -> None:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(tmp_path / "site"),
        str(PACKAGE),
    ]
    done = run_command(pip)
    assert done.code == 0, done.output
    [command] = re.findall(r"local\.sh (.+data=shapes.+)", GUIDE.read_text().replace("\\\n", " "))
    words = (*shlex.split(command), "max_steps=2", f"output_dir={tmp_path}", "name=run")
    # named twice: once
    succeed(*words, PYTHONPATH=str(tmp_path / "site"), DDP_TRAINER_PLUGINS="example_plugin")
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["example_plugin"] == "1.0"


def test_a_job_file_and_a_sweep_have_the_choices_of_plugins(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    run_dir = tmp_path / "frozen"
    words = (*EXAMPLE, "max_steps=2", f"output_dir={tmp_path}")
    frozen = succeed("freeze", str(job), "world_size=2", *words, "name=frozen", **PLUGIN)
    assert frozen.output == f"{run_dir}\n"
    succeed("train", f"job_file={job}", ranks=2, **PLUGIN)
    assert read_summary(run_dir)["steps"] == 2
    succeed("--multirun", *words, "name=sweep", "sync=ddp,reduce_broadcast", **PLUGIN)
    first, second = (
        newest_checkpoint(job)["model"] for job in (tmp_path / "sweep").iterdir() if job.is_dir()
    )
    torch.testing.assert_close(first, second)
    assert "ok" in succeed("verify", str(run_dir), **PLUGIN).output
    unknown = launch("train", f"job_file={job}")
    assert (unknown.code, unknown.output.count("\n")) == (USER_ERROR, 1)
    assert unknown.output.endswith(
        "=convmixer is unknown here: install its plug-in, or import the .py file that"
        " registers it\n"
    )


# --- what a user sees -----------------------------------------------------------------------------


@pytest.fixture
def before_torch(without_torch: dict[str, str]) -> dict[str, Any]:
    """Return the environment of the example plug-in, in which importing torch fails."""
    return PLUGIN | {"PYTHONPATH": f"{without_torch['PYTHONPATH']}{os.pathsep}{PACKAGE}"}


def test_a_key_without_a_default_is_in_the_help_and_must_be_given(tmp_path: Path) -> None:
    (tmp_path / "required.py").write_text(REQUIRED)
    variables: dict[str, Any] = {"DDP_TRAINER_PLUGINS": "required", "PYTHONPATH": str(tmp_path)}
    text = succeed("train", "--help", **variables).output
    assert re.search(r"^  model\.width=\?\?\? +Number of units\.$", text, re.MULTILINE)
    done = launch("model=wide", **variables)
    assert (done.code, done.output) == (2, "error: model.width is missing: give it a value\n")


def test_help_lists_the_keys_of_plugins(before_torch: dict[str, Any]) -> None:
    keys = succeed("train", "--help", **before_torch).output
    for group, name in CHOICES.items():
        assert f"\n{group}={name}\n" in keys
    assert re.search(r"^  model\.patch_size=2 +Side of the patches that ", keys, re.MULTILINE)


DATA_SETS = ", ".join(sorted({*registry.choices("data"), "shapes"}))


@pytest.mark.parametrize(
    "message",
    [
        "data.size=4 must be at least 8 pixels",
        "data.sise=9 is unknown: did you mean data.size?",
        f"data=shape is not a valid choice: did you mean shapes? choose from {DATA_SETS}; for a"
        " folder of images, data=imagefolder data.root=FOLDER",
    ],
)
def test_the_choices_and_keys_of_plugins_are_checked(
    message: str, before_torch: dict[str, Any]
) -> None:
    done = launch("data=shapes", message.split()[0], **before_torch)
    assert done == (USER_ERROR, f"error: {message}\n")


# --- a plug-in that cannot be loaded --------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("raise OSError('no\\nlicence')", "OSError: no licence"),
        (None, "ModuleNotFoundError: No module "),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_one_line_that_names_it(
    code: str | None, cause: str, tmp_path: Path, without_torch: dict[str, str]
) -> None:
    if code:
        (tmp_path / "mine.py").write_text(code)
    path = f"{without_torch['PYTHONPATH']}{os.pathsep}{tmp_path}"
    done = launch("--cfg", "job", DDP_TRAINER_PLUGINS="mine", PYTHONPATH=path)
    assert (done.code, done.output.count("\n")) == (USER_ERROR, 1)
    assert done.output.startswith(f"error: plug-in mine cannot be imported ({cause}")
    assert done.output.endswith(
        "correct or uninstall the plug-in, or remove it from DDP_TRAINER_PLUGINS\n"
    )


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget after the test what it registers."""
    monkeypatch.setattr(
        registry, "_choices", {group: dict(registry.choices(group)) for group in registry.GROUPS}
    )


@dataclass
class MineConfig(DataConfig):
    name: str = "mine"


NAME = ("name", str, "mine")


@pytest.mark.usefixtures("own_registry")
def test_a_name_is_a_word_and_registered_once() -> None:
    @dataclass
    class OtherConfig(DataConfig):
        name: str = "mine"

    register_dataset("mine", MineConfig, builder="mine:build")
    # a module that is imported again
    register_dataset("mine", MineConfig, builder="mine:build_better")
    again = make_dataclass("MineConfig", [("name", str, "mine")], bases=(MineConfig,))
    again.__module__ = MineConfig.__module__  # as a cell that runs again, or a reload, makes it
    register_dataset("mine", again, builder="mine:build_better")
    with pytest.raises(
        ValueError, match=r"^data=mine is already registered by test_plugins: choose another name$"
    ):
        register_dataset("mine", OtherConfig, builder="other:build")
    with pytest.raises(ValueError, match=r"^data=my data must consist of letters"):
        register_dataset(
            "my data", make_dataclass("My", [("name", str, "my data")], bases=(DataConfig,))
        )
    with pytest.raises(
        ValueError, match=r"^logger=my.log must consist of letters, digits and the characters _ -, "
    ):
        register_logger(
            "my.log", make_dataclass("My", [("name", str, "my.log")], bases=(LoggerConfig,))
        )


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    ("fields", "base", "builder", "message"),
    [
        ([NAME], ModelConfig, "no_function", "the builder of model=mine must be a function or "),
        ([NAME], ModelConfig, "a:b:c", "the builder of model=mine must be a function or "),
        ([NAME], object, "a:b", "Mine must be a subclass of ModelConfig"),
        (
            [("width", int, 1)],
            ModelConfig,
            "a:b",
            "Mine must be a dataclass with the field name: str = 'mine'",
        ),
        (
            [NAME, ("kind", set, 0)],
            ModelConfig,
            "a:b",
            "Mine.kind has a type that configs do not support",
        ),
    ],
)
def test_what_cannot_be_registered_is_refused(
    fields: list[Any], base: type, builder: str, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        register_model("mine", make_dataclass("Mine", fields, bases=(base,)), builder=builder)


SEVERAL = [name for name, group in registry.GROUPS.items() if group.several]


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("group", SEVERAL)
def test_a_group_with_several_choices_has_the_keys_of_each(group: str) -> None:
    base = getattr(ddp_trainer, f"{group.title()}Config")
    for name in ("first", "second"):
        schema = make_dataclass(name, [("name", str, name), ("size", int, 1)], bases=(base,))
        registry.register(group, name, schema, builder="mine:build")
    config = compose(f"{group}=[second,first]", f"{group}.first.size=3")
    chosen = getattr(config, group)
    assert {name: section.size for name, section in chosen.items()} == {"second": 1, "first": 3}
    assert from_builtins(to_builtins(config)) == config
    assert training_changes(to_builtins(compose(f"{group}=[]")), to_builtins(config)) == []
    with pytest.raises(Exception) as refused:  # noqa: PT011  # Hydra and OmegaConf have many kinds
        compose(f"{group}=[first]", f"{group}.first.sise=3")
    assert format_config_error(refused.value, [f"{group}.first.sise=3"]) == (
        f"{group}.first.sise=3 is unknown: did you mean {group}.first.size?"
    )


def versions_differ(folder: str, plugin: str) -> str:
    """Compare the ranks, of which each has another version of the plug-in."""
    rank = read_environment().rank
    (Path(folder) / str(rank) / plugin).mkdir(parents=True)
    (Path(folder) / str(rank) / plugin / "__init__.py").touch()
    (Path(folder) / str(rank) / plugin / "model.py").write_text(f"# of rank {rank}\n")
    sys.path.insert(0, f"{folder}/{rank}")
    load_plugins([plugin])
    try:
        run(compose(f"output_dir={folder}", "name=run", "max_steps=1"))
    except ConfigError as error:
        shutdown()
        return str(error)
    return ""


def test_versions_of_plugins_are_compared_over_ranks(tmp_path: Path) -> None:
    first, second = on_ranks(2, versions_differ, str(tmp_path), "mine")
    assert first == second
    assert re.match(
        r"rank 1 was started with .*\(plug-in mine: sha256:\w+ → sha256:\w+\)", first
    ), first


# --- what builders must return --------------------------------------------------------------------

IMAGES = torch.zeros(6, 1, 8, 8, dtype=torch.uint8)
LABELS = torch.arange(6) % 3
GOOD = ImageTensors(IMAGES, LABELS)
FLOATS = [(image / 255, 0) for image in IMAGES]


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    ("train", "evaluation", "message"),
    [
        (
            ImageTensors(IMAGES.float(), LABELS),
            GOOD,
            "train images must be uint8 [N, C, H, W] and are torch.float32 [",
        ),
        (
            ImageTensors(IMAGES[0], LABELS),
            GOOD,
            "train images must be uint8 [N, C, H, W] and are torch.uint8 [1, 8, ",
        ),
        (
            GOOD,
            ImageTensors(IMAGES, LABELS[:5]),
            "eval labels must be int64 [6] and are torch.int64 [5]",
        ),
        (ImageTensors(IMAGES, LABELS + 1), GOOD, "train labels must be 0 to 2 and are 1 to 3"),
        (GOOD, ImageTensors(IMAGES[:0], LABELS[:0]), "eval has no sample"),
        (iter([]), GOOD, "train has no length: it must be ImageTensors or a map-style data set"),
        (
            GOOD,
            ImageTensors(IMAGES[..., :6], LABELS),
            "images must have one shape: train has (1, 8, 8) and eval (1, 8",
        ),
        (
            FLOATS,
            GOOD,
            (
                "sample 0 of list must be a uint8 tensor [C, H, W] or a PIL image and is"
                " torch.float32 [1, 8"
            ),
        ),
        (
            [(IMAGES[0], 1.5)],
            GOOD,
            "sample 0 of list cannot be read: TypeError: 'float' object cannot be interpreted",
        ),
    ],
)
def test_splits_that_do_not_fit_are_one_error(train: Any, evaluation: Any, message: str) -> None:
    datasets = Datasets(train=train, eval=evaluation, class_names=["a", "b", "c"])
    register_dataset("mine", MineConfig, builder=lambda config: datasets)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'data=mine: {message}')}"):
        build_datasets(MineConfig())


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("names", [None, [0, 1, 2]])
def test_class_names_that_are_no_texts_are_one_error(names: Any) -> None:
    datasets = Datasets(train=GOOD, eval=GOOD, class_names=names)
    register_dataset("mine", MineConfig, builder=lambda config: datasets)
    with pytest.raises(ConfigError, match=r"^data=mine: class_names must be a sequence of texts"):
        build_datasets(MineConfig())


@pytest.mark.usefixtures("own_registry")
def test_two_classes_of_one_name_are_one_error() -> None:
    datasets = Datasets(train=GOOD, eval=GOOD, class_names=["a", "b", "a"])
    register_dataset("mine", MineConfig, builder=lambda config: datasets)
    with pytest.raises(ConfigError, match=r"^data=mine: class_names has a name twice"):
        build_datasets(MineConfig())


@pytest.mark.usefixtures("own_registry")
def test_memory_that_is_used_up_by_the_first_image_is_one_error() -> None:
    class Large(Dataset[Any]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            raise MemoryError

    register_dataset(
        "mine",
        MineConfig,
        builder=lambda config: Datasets(train=Large(), eval=GOOD, class_names="abc"),
    )
    with pytest.raises(
        ConfigError,
        match=r"^data=mine does not fit into the memory of this host: use a larger host$",
    ):
        build_datasets(MineConfig())


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    ("group", "base", "returns"),
    [
        ("model", ModelConfig, "Module"),
        ("data", DataConfig, "Datasets"),
        ("sync", SyncConfig, "GradientSync"),
        ("logger", LoggerConfig, "Logger"),
        ("optimizer", OptimizerConfig, "Optimizer"),
        ("scheduler", SchedulerConfig, "Callable"),
        ("loss", LossConfig, "Callable"),
        ("metric", MetricConfig, "Callable"),
        ("observer", ObserverConfig, "Observer"),
    ],
)
def test_a_builder_that_returns_something_else_is_one_error(
    group: str, base: type, returns: str, tmp_path: Path
) -> None:
    schema = make_dataclass("MineConfig", [("name", str, "mine")], bases=(base,))
    registry.register(group, "mine", schema, builder=lambda config, *args, **options: None)
    chosen: Any = {group: {"mine": schema()} if registry.GROUPS[group].several else schema()}
    config = Config(output_dir=str(tmp_path), **chosen)
    message = (
        f"^{group}=mine: the builder must return an object of type {returns}, and returned an"
        " object of type NoneType$"
    )
    with pytest.raises(registry.PluginError, match=message):
        run(config)
    shutdown()


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("num_outputs", [9, 11])
def test_a_model_with_another_number_of_classes_is_one_error(
    num_outputs: int, tmp_path: Path
) -> None:
    @dataclass
    class LinearConfig(ModelConfig):
        name: str = "linear"

    @register_model("linear", LinearConfig)
    def build(
        config: LinearConfig, *, image_shape: tuple[int, int, int], num_classes: int
    ) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(image_shape), num_outputs))

    with pytest.raises(
        ConfigError,
        match=r"^model=linear must return logits \[images, classes\], which is \[2, 10\] ",
    ):
        run(Config(output_dir=str(tmp_path), model=LinearConfig()))
    shutdown()


# --- what the papers show -------------------------------------------------------------------------


def test_the_guide_shows_the_files_of_the_example() -> None:
    blocks = re.findall(
        r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL
    )
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".toml")]
    assert dict(blocks) == {str(path.relative_to(PACKAGE)): path.read_text() for path in files}


def test_the_model_of_the_readme_trains(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("## Your own model")[2]
    [code] = re.findall(
        r"^```python\n(.*?)^```", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL
    )
    (tmp_path / "tiny.py").write_text(code)
    done = succeed(
        "model=tiny", "model.width=128", "max_steps=1", cwd=tmp_path, DDP_TRAINER_PLUGINS="tiny"
    )
    assert "tiny (" in done.output


# --- one more choice, and nothing else changes ----------------------------------------------------


def test_a_model_is_added_to_the_package_in_two_files(tmp_path: Path) -> None:
    """Add the example's model to a copy of the package: its file, and a schema with its
    registration.
    """
    shutil.copytree(
        ROOT / "ddp_trainer", tmp_path / "ddp_trainer", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    text = (PACKAGE / "example_plugin" / "convmixer.py").read_text()
    text = text.replace("from example_plugin import", "from ddp_trainer.config.models import")
    (tmp_path / "ddp_trainer" / "models" / "convmixer.py").write_text(text)
    with (tmp_path / "ddp_trainer" / "config" / "models.py").open("a") as file:
        file.write("""

@config_class
class ConvMixerConfig(ModelConfig):
    name: str = "convmixer"
    width: int = 16
    depth: int = 2
    patch_size: int = 2


register_model("convmixer", ConvMixerConfig, builder="ddp_trainer.models.convmixer:build_convmixer")
""")
    done = succeed(
        "model=convmixer", "data=digits", "max_steps=1", cwd=tmp_path, PYTHONPATH=str(tmp_path)
    )
    assert "convmixer (" in done.output
    assert read_summary(tmp_path / "outputs" / "digits-convmixer-ddp")["steps"] == 1


def test_existing_tests_hold_with_the_choices_of_plugins() -> None:
    """Run the tests that see all choices of a group in a process that has loaded the example."""
    files = ["config/test_config.py", "test_bad_input.py", "commands/test_train.py"]
    selected = (
        "same_defaults or every_key or every_rule or choices_of_each_group or completion_offers or"
        " null"
    )
    options = ["-v", "--assert=plain", "-p", "no:cacheprovider"]  # assertions are not rewritten
    words = ["-m", "pytest", *options, *files, "-k", selected]
    done = run_forked(words, cwd=ROOT / "tests", deadline=240, **PLUGIN)
    assert done.code == 0, done.output
    for group, name in CHOICES.items():
        # the parametrized lists come from the registry
        assert f"[{group}-{name}] PASSED" in done.output
    for test in (
        "test_a_bad_argument_is_named_with_its_rule[model=null]",
        "choices_of_each_group",
        "completion_",
    ):
        assert test in done.output
