"""Bad input is one error that names the key, the value, the rule and the fix."""

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, compose, launch, on_ranks, train_on

from ddp_trainer import __main__, registry
from ddp_trainer.checkpoint.run_dir import lock_run_dir
from ddp_trainer.commands import command_line
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.messages import format_config_error
from ddp_trainer.distributed.environment import Environment, read_environment

CHECKED_FIRST = ("model=lenet", "data=synthetic", "data.channels=1", "data.mean=[0.5]", "data.std=[0.25]")


def refusal(*overrides: str) -> str:
    """Return what the command line would say of `overrides`."""
    with pytest.raises(Exception) as refused:  # noqa: PT011  # Hydra and OmegaConf have many kinds
        compose(*overrides)
    return format_config_error(refused.value, overrides)


def not_a(group: str) -> str:
    """Return the message on a value that is no choice of `group`."""
    return f"is not a valid choice: choose from {', '.join(sorted(registry.choices(group)))}"


# --- what the config alone decides --------------------------------------------------------------

KEYS = {
    "foo=1": "foo=1 is unknown: --help lists the keys",
    "+foo=1": "+foo=1 is unknown: --help lists the keys",
    "++foo=1": "++foo=1 is unknown: --help lists the keys",
    "a.b.c=1": "a.b.c=1 is unknown: --help lists the keys",
    "modle=lenet": "modle=lenet is unknown: did you mean model?",
    "+epoch=3": "+epoch=3 is unknown: did you mean epochs?",
    "lr=0.1": "lr=0.1 is unknown: did you mean optimizer.lr?",
    "batch_size=32": "batch_size=32 is unknown: did you mean eval_batch_size or global_batch_size?",
    "checkpoint.foo=1": "checkpoint.foo=1 is unknown: checkpoint has every_seconds, every_steps, keep_best, keep_last",
    "data.foo=1": "data.foo=1 is unknown: data=digits has augment, mean, name, num_workers, std, validation_fraction",
    "data.avgment=null": "data.avgment=null is unknown: did you mean data.augment?",
    "model.lr=1": "model.lr=1 is unknown: did you mean optimizer.lr?",
    "+data.augment.xyz=1": "+data.augment.xyz=1 is unknown: data.augment has random_crop_padding, random_erasing, ",
    "model.init=d2l": "model.init=d2l does not go with model=resnet18: it is a key of model=lenet",
    "+epochs=3": "+epochs=3 adds a key that exists: write epochs=… to change it",
    "~epochs": "~epochs removes a key that is needed: set it instead, epochs=…",
    "~foo": "~foo removes a key that does not exist: --help lists the keys",
    "~data": "~data removes a key that is needed: set it instead, data=…",
    "optimizer.lr=???": "optimizer.lr is missing: give it a value",
}
CHOICES = {
    "model=resnet": f"model=resnet {not_a('model')} (did you mean resnet18?)",
    "sync=mpi": f"sync=mpi {not_a('sync')}",
    "experiment=mine": "experiment=mine is not a valid choice: choose from ",
    "model=null": f"model=null {not_a('model')}",
    "experiment=null": "experiment=null is not a valid choice: name a file of conf/experiment, or leave it out",
    "model=???": f"model=??? {not_a('model')}",
    "model.name=vgg": "model.name=vgg must stay resnet18: for another choice write model=vgg",
    "model.stem=big": "model.stem=big must be one of imagenet, small",
    "precision=fp8": "precision=fp8 must be one of auto, fp32, bf16, fp16",
    "backend=mpi": "backend=mpi must be one of auto, gloo, nccl",
    "device=gpu": "device=gpu must be one of auto, cpu, cuda",
    "resume=yes": "resume=yes must be one of auto, never, must",
    "checkpoint=null": "checkpoint=null replaces a whole section: set checkpoint.every_steps",
}
TYPES = {
    "epochs=ten": "epochs=ten must be a whole number",
    "epochs=1.5": "epochs=1.5 must be a whole number",
    "epochs=nan": "epochs=nan must be a whole number",
    "epochs=true": "epochs=true must be a whole number",
    "epochs=null": "epochs=null must be a whole number",
    "epochs=": "epochs= must be a whole number",
    "epochs=[1,2]": "epochs=[1,2] must be a whole number",
    "epochs={a:1}": "epochs={a:1} must be a whole number",
    "max_steps=soon": "max_steps=soon must be a whole number or null",
    "optimizer.lr=fast": "optimizer.lr=fast must be a number",
    "compile=perhaps": "compile=perhaps must be true or false",
    "name=null": "name=null must be text",
    "data.mean=0.5": "data.mean=0.5 must be a list of numbers",
    "data.mean=[a]": "data.mean=[a] must be a list of numbers",
    "optimizer.lr=${foo}": "optimizer.lr=${foo} cannot be resolved: Interpolation key 'foo' not found",
    "num_threads=many": "num_threads=many must be auto or 1 to 1024",
    "num_threads=1.5": "num_threads=1.5 must be auto or 1 to 1024",
    "num_threads=true": "num_threads=true must be auto or 1 to 1024",
    "channels_last=maybe": "channels_last=maybe must be auto, true or false",
    "channels_last=2": "channels_last=2 must be auto, true or false",
}
VALUES = {
    "epochs=0": "epochs=0 must be greater than 0",
    "epochs=-3": "epochs=-3 must be greater than 0",
    "max_steps=0": "max_steps=0 must be greater than 0",
    "global_batch_size=0": "global_batch_size=0 must be greater than 0",
    "eval_batch_size=-1": "eval_batch_size=-1 must be greater than 0",
    "gradient_accumulation_steps=0": "gradient_accumulation_steps=0 must be greater than 0",
    "gradient_accumulation_steps=257": "gradient_accumulation_steps=257 must be at most global_batch_size=256",
    "timeout_seconds=0": "timeout_seconds=0 must be greater than 0",
    "log_every_steps=0": "log_every_steps=0 must be greater than 0",
    "checkpoint.keep_last=0": "checkpoint.keep_last=0 must be greater than 0",
    "checkpoint.every_seconds=nan": "checkpoint.every_seconds=nan must be greater than 0",
    "num_threads=0": "num_threads=0 must be auto or 1 to 1024",
    "num_threads=100000": "num_threads=100000 must be auto or 1 to 1024",
    "optimizer.lr=-1": "optimizer.lr=-1.0 must be greater than 0",
    "optimizer.lr=nan": "optimizer.lr=nan must be greater than 0",
    "optimizer.lr=inf": "optimizer.lr=inf must be finite",
    "optimizer.momentum=1": "optimizer.momentum=1.0 must be in [0, 1)",
    "optimizer.weight_decay=inf": "optimizer.weight_decay=inf must be finite",
    "max_grad_norm=0": "max_grad_norm=0.0 must be greater than 0",
    "max_grad_norm=inf": "max_grad_norm=inf must be finite",
    "label_smoothing=1": "label_smoothing=1.0 must be in [0, 1)",
    "seed=-1": "seed=-1 must be 0 to 2^63 - 1",
    "name=../x": "name='../x' must be one plain name, without /: it is the run's folder in output_dir",
    "name=a/b": "name='a/b' must be one plain name",
    "name=..": "name='..' must be one plain name",
    "name=": "name='' must be one plain name",
    "output_dir=": "output_dir= is empty: give a folder, . is this one",
    "scheduler.warmup_epochs=11": "scheduler.warmup_epochs=11.0 must be at most epochs=10",
    "data.augment.random_crop_padding=-1": "data.augment.random_crop_padding=-1 must be 0 (no crop) or more pixels",
    "data.augment.random_erasing=2": "data.augment.random_erasing=2.0 is a probability: choose a value in [0, 1]",
    "data.mean=[0.5,0.5]": "data.mean=[0.5, 0.5] and data.std=[0.354] must have one value per channel each",
    "data.mean=[nan]": "data.mean=[nan] must be finite",
    "data.std=[0]": "data.std=[0.0] must be greater than 0 in every channel",
    "sync.bucket_cap_mb=0": "sync.bucket_cap_mb=0 must be auto or 1 to 1048576",
    "sync.bucket_cap_mb=1.5": "sync.bucket_cap_mb=1.5 must be auto or 1 to 1048576",
    "data.validation_fraction=1": "data.validation_fraction=1.0 must be in [0, 1)",
}
FORMS = {
    "epochs": "'epochs' cannot be read: write key=value without spaces",
    "epochs:5": "'epochs:5' cannot be read: ",
    "epochs=[1": "'epochs=[1' cannot be read: ",
    'name="x': "'name=\"x' cannot be read: ",
    "epochs=1,2": "epochs=1,2 has several values: add --multirun to run each, or make it a list, 'epochs=[1,2]'",
}
TOGETHER: dict[tuple[str, ...], str] = {
    ("data=synthetic", "data.num_eval=0"): "data.num_eval=0 must be greater than 0",
    ("data=synthetic", "data.height=-8"): "data.height=-8 must be greater than 0",
    ("data=synthetic", "data.num_classes=1"): "data.num_classes=1 must be 2 to 256",
    ("data=synthetic", "data.channels=1"): "data.mean=[0.5, 0.5, 0.5] must have one value per channel",
    (
        "data=synthetic",
        "data.augment.random_crop_padding=32",
    ): "data.augment.random_crop_padding=32 must be smaller than the images",
    ("optimizer=adamw", "optimizer.momentum=0"): "optimizer.momentum=0 does not go with optimizer=adamw",
    ("optimizer=adamw", "optimizer.betas=[0.9]"): "optimizer.betas=[0.9] must be two values in [0, 1)",
    ("optimizer.nesterov=true", "optimizer.momentum=0"): "optimizer.nesterov=true needs momentum",
    (
        "scheduler=onecycle",
        "scheduler.warmup_epochs=1",
    ): "scheduler.warmup_epochs=1.0 must be 0: onecycle climbs by scheduler.rise instead",
    ("scheduler=step", "scheduler.gamma=0"): "scheduler.gamma=0.0 must be greater than 0",
    ("device=cpu", "backend=nccl"): "backend=nccl is for GPUs and device=cpu: use backend=gloo",
}
ALONE = KEYS | CHOICES | TYPES | VALUES | FORMS


@pytest.mark.parametrize("override", ALONE)
def test_a_bad_argument_is_named_with_its_rule(override: str) -> None:
    said = refusal(override)
    assert said.startswith(ALONE[override])
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("overrides", TOGETHER, ids=" ".join)
def test_arguments_that_do_not_go_together_are_named(overrides: tuple[str, ...]) -> None:
    assert refusal(*overrides).startswith(TOGETHER[overrides])


YAML = {
    "epochs: ten": "experiment/mine.yaml: epochs=ten must be a whole number",
    "epoch: 3": "experiment/mine.yaml: epoch is unknown: did you mean epochs?",
    "epochs: 0": "epochs=0 must be greater than 0",
    "optimizer:\n  lr: [1": "while parsing a flow sequence",
    "defaults: [override /model: resnet]": f"model=resnet {not_a('model')} (did you mean resnet18?)",
}


@pytest.mark.parametrize("text", YAML)
def test_a_bad_line_in_a_file_of_the_user_is_named_with_the_file(
    text: str, tmp_path: Path, without_torch: dict[str, Any]
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    done = launch("experiment=mine", f"--config-dir={tmp_path}", **without_torch)
    assert (done.code, done.output.count("\n")) == (2, 1)
    assert done.output.startswith(f"error: {YAML[text]}")


PLAIN = {
    "epoch=3": "epoch=3 is unknown: did you mean epochs?",
    "model=resnet": f"model=resnet {not_a('model')} (did you mean resnet18?)",
    "epochs=0": "epochs=0 must be greater than 0",
    "data=null": f"data=null {not_a('data')}",
    "--epochs=3": "--epochs=3 is not a flag: set a key without dashes, key=value; --hydra-help lists the flags",
    "--cfg=foo": "argument --cfg/-c: invalid choice: 'foo' (choose from ",
}


@pytest.mark.parametrize("argument", PLAIN)
def test_the_command_says_one_line_and_exits_2_before_it_imports_torch(
    argument: str, tmp_path: Path, without_torch: dict[str, Any]
) -> None:
    done = launch(argument, cwd=tmp_path, **without_torch)
    assert (done.code, done.output.count("\n")) == (2, 1)
    assert done.output.startswith(f"error: {PLAIN[argument]}")
    assert [path.name for path in tmp_path.iterdir()] == ["no"]


# --- what the launcher says ---------------------------------------------------------------------

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400",
}  # fmt: skip


def test_without_a_launcher_a_process_is_alone() -> None:
    assert read_environment({}) == Environment()


def test_torchruns_variables_give_the_place_among_the_ranks() -> None:
    place = read_environment(TORCHRUN)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (1, 4, 1, 2)
    assert (place.master_addr, place.master_port, place.under_torchrun) == ("10.0.0.1", 29400, True)


@pytest.mark.parametrize("lacking", TORCHRUN)
def test_a_launchers_variable_that_is_missing_is_named(lacking: str) -> None:
    variables = {name: value for name, value in TORCHRUN.items() if name != lacking}
    with pytest.raises(ConfigError, match=rf"=\d is set and {lacking} not: start with torchrun"):
        read_environment(variables)


@pytest.mark.parametrize(("name", "value"), [("RANK", "4"), ("LOCAL_RANK", "2"), ("RANK", "-1"), ("WORLD_SIZE", "x")])
def test_a_launchers_variable_that_makes_no_sense_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}={value} "):
        read_environment(TORCHRUN | {name: value})


def test_half_of_a_launchers_variables_is_one_error(without_torch: dict[str, Any]) -> None:
    done = launch(*CHECKED_FIRST, RANK="1", **without_torch)
    assert done.code == 2
    assert done.output.startswith("error: RANK=1 is set and WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_PORT")
    assert done.output.count("\n") == 1


# --- what needs the number of ranks, the data or the directory ----------------------------------


def _main(arguments: tuple[str, ...]) -> tuple[Any, str]:
    """Run the command line in this process. Return its exit code and what it wrote to stderr."""
    command_line.RANK_0_SECONDS = 0.0  # nobody ends the other ranks here
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.argv = ["ddp_trainer", *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            __main__.main()
        except SystemExit as left:
            return left.code, said.getvalue()
    return 0, said.getvalue()


def refused_on_two_ranks(*arguments: str, code: int = 2) -> str:
    """Return what the command line says of `arguments` on two ranks, seeing that it ends both and says it once."""
    began = time.monotonic()
    (first, said), (second, silence) = on_ranks(2, _main, arguments)
    assert (first, second, silence) == (code, code, "")
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert time.monotonic() - began < 30
    return said.removeprefix("error: ").rstrip()


ON_TWO_RANKS = {
    "epoch=3": "epoch=3 is unknown: did you mean epochs?",
    "global_batch_size=1": "global_batch_size=1 must be at least the world size, 2: ",
    "gradient_accumulation_steps=7": "gradient_accumulation_steps=7 must be at most the 6 samples of a rank: ",
    "sync=none": "sync=none is for one process and there are 2 ranks: use sync=ddp",
    "global_batch_size=97": "global_batch_size=97 must be at most the number of training samples, 96",
    "device=cuda": "device=cuda needs a GPU and none is visible: ",
    "data.height=4": "model=lenet needs images of at least 8×8 pixels",
    "resume=must": "resume=must needs a checkpoint and ",
}


@pytest.mark.parametrize("override", ON_TWO_RANKS)
def test_all_ranks_refuse_and_one_says_why(override: str, tmp_path: Path) -> None:
    said = refused_on_two_ranks(*TINY, override, f"output_dir={tmp_path}")
    assert said.startswith(ON_TWO_RANKS[override])


def test_images_of_another_shape_than_the_config_says_are_refused(tmp_path: Path) -> None:
    colour = refused_on_two_ranks("data=digits", "data.mean=[0,0,0]", "data.std=[1,1,1]", f"output_dir={tmp_path}")
    assert colour.startswith("data.mean=[0.0, 0.0, 0.0] must have one value per channel, and so must data.std: ")
    crop = refused_on_two_ranks("data=digits", "data.augment.random_crop_padding=8", f"output_dir={tmp_path}")
    assert crop == "data.augment.random_crop_padding=8 must be smaller than the images of 8×8 pixels"


def test_a_data_root_without_the_files_is_refused(tmp_path: Path) -> None:
    said = refused_on_two_ranks("data=fashion_mnist", f"data.root={tmp_path}", f"output_dir={tmp_path}")
    assert said.startswith(f"data.root={tmp_path} must be a folder with Fashion-MNIST's four IDX files")
    assert "lacks train-images-idx3-ubyte" in said


def test_an_output_dir_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said = refused_on_two_ranks(*TINY, f"output_dir={tmp_path}/file")
    assert said.startswith(f"output_dir={tmp_path}/file must be a folder that can be written: there is a file")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output_dir of a finished run named "old"."""
    output_dir = tmp_path_factory.mktemp("trained")
    train_on(1, *TINY, f"output_dir={output_dir}", "name=old", "epochs=1")
    return output_dir


def test_a_run_directory_of_another_config_is_refused_by_naming_the_keys(trained: Path) -> None:
    said = refused_on_two_ranks(
        *TINY, f"output_dir={trained}", "name=old", "epochs=1", "optimizer.lr=0.3", "seed=1", "num_threads=1"
    )
    assert said == (
        f"{trained}/old holds a run of another config (optimizer.lr: 0.2 → 0.3; seed: 0 → 1): choose name=… for a new "
        "run, or resume=never to start from step 0 (the old directory is renamed)"
    )


def test_a_refused_launch_leaves_the_directory_to_the_corrected_one(tmp_path: Path) -> None:
    refused_on_two_ranks(*TINY, f"output_dir={tmp_path}", "name=new", "data.height=4")
    train_on(1, *TINY, f"output_dir={tmp_path}", "name=new", "epochs=1")


@contextlib.contextmanager
def occupied(run_dir: Path, *overrides: str) -> Iterator[None]:
    config = compose(*overrides)
    with lock_run_dir(run_dir, to_builtins(config), resume=config.resume):
        yield


def test_a_second_launch_into_a_live_run_directory_is_refused(tmp_path: Path) -> None:
    overrides = (*TINY, f"output_dir={tmp_path}", "name=live")
    with occupied(tmp_path / "live", *overrides):
        said = refused_on_two_ranks(*overrides, code=1)
    assert said == f"another launch is running in {tmp_path}/live: wait for it, stop it, or choose name=…"


@pytest.mark.parametrize("argument", ["epoch=3", "--epochs=3", "backend=nccl"])
def test_under_torchrun_the_error_is_printed_once_and_soon(argument: str, tmp_path: Path) -> None:
    began = time.monotonic()
    done = launch(*TINY, f"output_dir={tmp_path}", argument, ranks=2, CUDA_VISIBLE_DEVICES="")
    assert done.code == 1  # torchrun's own
    assert done.output.count("error: ") == 1, done.output
    assert f"error: {argument} " in done.output
    assert "ddp_trainer/" not in done.output, "a traceback of ours"
    assert time.monotonic() - began < 30
