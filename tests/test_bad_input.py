"""Bad input is one error that names the key, the value, the rule and the fix."""

import ctypes
import gc
import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from processes import launch, on_ranks
from runs import TINY, compose, train_on

from ddp_trainer import __main__, registry
from ddp_trainer.checkpoint.run_dir import lock_run_dir
from ddp_trainer.commands import command_line
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.messages import format_config_error
from ddp_trainer.distributed.environment import Environment, read_environment
from ddp_trainer.distributed.process_group import shutdown

CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2
"""The rights of root to read and to search any folder, from Linux's capability.h."""


def not_a(group: str) -> str:
    """Return the message on a value that is no choice of `group`."""
    return f"is not a valid choice: choose from {', '.join(sorted(registry.choices(group)))}"


# --- what the config alone decides --------------------------------------------------------------

ONE_ARGUMENT = [
    # unknown keys
    "foo=1 is unknown: --help lists the keys",
    "+foo=1 is unknown: --help lists the keys",
    "modle=lenet is unknown: did you mean model?",
    "+epoch=3 is unknown: did you mean epochs?",
    "lr=0.1 is unknown: did you mean optimizer.lr?",
    "batch_size=32 is unknown: did you mean eval_batch_size or global_batch_size?",
    "checkpoint.foo=1 is unknown: checkpoint has every_seconds, every_steps, keep_best, keep_last",
    (
        "data.foo=1 is unknown: data=digits has augment, fold, mean, name, num_folds, num_workers,"
        " on_bad_image, sampling, std, validation_fraction"
    ),
    "+data.augment.xyz=1 is unknown: data.augment has color_jitter, cutmix, mixup, rand_augment, ",
    "model.init=d2l does not belong to model=resnet18: it is a key of model=lenet",
    "label_smoothing=0.1 is unknown: did you mean loss.label_smoothing?",
    "+epochs=3 adds a key that exists: write epochs=… to change it",
    "~epochs removes a key, and every key is needed: set it instead, epochs=…",
    # choices
    "model=resnet is not a valid choice: did you mean resnet18 or lenet? choose from lenet, ",
    f"sync=mpi {not_a('sync')}",
    f"loss=hinge {not_a('loss')}",
    "model=null is not the name of a choice: python -m ddp_trainer --help lists all names",
    "model=??? is not the name of a choice: ",
    "experiment=mine is not a valid choice: choose from ",
    "experiment=null is not the name of a choice: ",
    "model.name=vgg cannot be set: ",
    "precision=fp8 must be one of auto, fp32, bf16, fp16",
    "resume=yes must be one of auto, never, must",
    "checkpoint=null replaces a whole section: set the keys in it",
    # types
    "epochs=ten must be a whole number",
    "epochs=1.5 must be a whole number",
    "epochs=true must be a whole number",
    "epochs=null must be a whole number",
    "epochs=[1,2] must be a whole number",
    "max_steps=soon must be a whole number or null",
    "optimizer.lr=fast must be a number",
    "compile=perhaps must be true or false",
    "name=null must be text",
    "data.mean=0.5 must be a list of numbers",
    "optimizer.lr=${foo} is not valid: Interpolation key 'foo' not found",
    "num_threads=many must be auto or 1 to 1024",
    "num_threads=true must be auto or 1 to 1024",
    "channels_last=2 must be auto, true or false",
    # values
    "epochs=0 must be greater than 0",
    "global_batch_size=0 must be greater than 0",
    "eval_batch_size=-1 must be greater than 0",
    "gradient_accumulation_steps=0 must be greater than 0",
    "gradient_accumulation_steps=257 must be at most global_batch_size=256",
    "checkpoint.keep_last=0 must be greater than 0",
    "checkpoint.every_seconds=nan must be greater than 0",
    "num_threads=100000 must be auto or 1 to 1024",
    "optimizer.lr=-1.0 must be greater than 0",
    "optimizer.lr=inf must be finite",
    "optimizer.momentum=1.0 must be in [0, 1)",
    "loss.label_smoothing=1.0 must be in [0, 1)",
    "seed=-1 must be 0 to 2^63 - 1",
    "output_dir= is empty: give a folder, for example . for the current one",
    "data.augment.random_crop_padding=-1 must be 0 or more",
    "data.augment.random_erasing=2.0 must be in [0, 1]",
    "data.mean=[nan] must be finite",
    "data.std=[0.0] must be at least 1e-6 in every channel",
    "data.validation_fraction=1.0 must be in [0, 1)",
    "sync.bucket_cap_mb=0 must be auto or 1 to 1048576",
]
"""Messages that begin with the argument as it was written."""

ARGUMENTS = {
    "optimizer.lr=???": "optimizer.lr is missing: give it a value",
    "optimizer.lr=-1": "optimizer.lr=-1.0 must be greater than 0",
    "name=../x": (
        "name='../x' must be one plain name, without /: it is the run's folder in output_dir"
    ),
    "name=..": "name='..' must be one plain name",
    f"name={'a' * 202}": f"name={'a' * 20}… has 202 bytes: use at most 200",
    "name=": "name='' must be one plain name",
    "data.mean=[0.5,0.5]": (
        "data.mean=[0.5, 0.5] and data.std=[0.354] must have the same length, not 0: "
    ),
    "epochs": "'epochs' cannot be read: a setting is key=value; put one that has",
    "epochs=[1": "'epochs=[1' cannot be read: ",
    'name="x': "'name=\"x' cannot be read: ",
    "epochs=1,2": (
        "epochs=1,2 has several values: add --multirun to run each, or give it one value (a decimal"
    ),
    "model=lenet,resnet18": "model=lenet,resnet18 has several values: add --multirun to run each, ",
    "model=[lenet,resnet18]": (
        "model=[lenet,resnet18] must be one choice: to run several, write --multirun model=A,B"
    ),
    "model.freeze=a,b": (
        "model.freeze=a,b has several values: add --multirun to run each, or make it a list,"
        " 'model.freeze=[a,b]'"
    ),
    "metric=auroc,topk": (
        "metric=auroc,topk has several values: add --multirun to run each, or make it a list,"
        " 'metric=[auroc,topk]'"
    ),
    "ema.decay=1": "ema.decay=1.0 must be greater than 0 and less than 1",
    "ema.decay=0": "ema.decay=0.0 must be greater than 0 and less than 1",
    "recovery.silent_seconds=0.5": "recovery.silent_seconds=0.5 must be at least 1",
    "sync=local_sgd ema.decay=0.9": "ema.decay=0.9 needs parameters that are equal on all ranks",
    "sync=async_parameter_server on_nonfinite=skip": (
        "on_nonfinite=skip needs ranks that leave out an update together, and with"
        " sync=async_parameter_server each goes on by itself: use on_nonfinite=stop, or sync=ddp"
    ),
    "sync=async_parameter_server sync.max_staleness=65": "sync.max_staleness=65 must be 0 to 64",
    "data=synthetic data.num_eval=0": "data.num_eval=0 must be greater than 0",
    "data=synthetic data.num_classes=1": "data.num_classes=1 must be 2 to 256",
    "optimizer=adamw optimizer.momentum=0": (
        "optimizer.momentum=0 does not belong to optimizer=adamw"
    ),
    "optimizer=adamw optimizer.betas=[0.9]": "optimizer.betas=[0.9] must be two values in [0, 1)",
    "optimizer=lamb optimizer.betas=[0.9,1]": (
        "optimizer.betas=[0.9, 1.0] must be two values in [0, 1)"
    ),
    "optimizer.nesterov=true optimizer.momentum=0": "optimizer.nesterov=true needs momentum",
    "scheduler=onecycle scheduler.warmup_epochs=1": (
        "scheduler.warmup_epochs=1.0 must be 0: onecycle warms up "
    ),
    "scheduler=step scheduler.gamma=0": "scheduler.gamma=0.0 must be greater than 0",
    "logger=wandb logger.wandb.mode=never": (
        "logger.wandb.mode=never must be one of auto, online, offline"
    ),
    "logger=[jsonl,mlflow] logger.mlflow.uri=x": "logger.mlflow.uri=x is unknown: ",
    "device=cpu backend=nccl": (
        "backend=nccl needs GPUs and does not work with device=cpu: use backend=gloo"
    ),
} | {message.split()[0]: message for message in ONE_ARGUMENT}


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_bad_argument_is_named_with_its_rule(arguments: str) -> None:
    with pytest.raises(Exception) as refused:  # noqa: PT011  # Hydra and OmegaConf have many kinds
        compose(*arguments.split(" "))
    message = format_config_error(refused.value, arguments.split(" "))
    assert message.startswith(ARGUMENTS[arguments])
    assert len(message.splitlines()) == 1


LAUNCHES = {
    ("epochs=0", ""): "epochs=0 must be greater than 0",
    (
        "--epochs=3",
        "",
    ): (
        "unrecognized arguments: --epochs=3: set keys without dashes, key=value, and put all flags"
        " before or after the keys; --hydra-help lists the flags"
    ),
    ("--cfg=foo", ""): "argument --cfg/-c: invalid choice: 'foo' (choose from ",
    ("experiment=mine", "epochs: ten"): "experiment/mine.yaml: epochs=ten must be a whole number",
    ("experiment=mine", "epoch: 3"): "experiment/mine.yaml: epoch is unknown: did you mean epochs?",
    ("experiment=mine", "label_smoothing: 0.1"): (
        "experiment/mine.yaml: label_smoothing is unknown: did you mean loss.label_smoothing?"
    ),
    ("experiment=mine", "epochs: 0"): "epochs=0 must be greater than 0",
    ("experiment=mine", "optimizer:\n  lr: [1"): "while parsing a flow sequence",
    ("experiment=mine", "defaults: [override /model: vgg]"): f"model=vgg {not_a('model')}",
}
"""The message on an argument, and on a line in a file of the user."""


@pytest.mark.parametrize(("argument", "yaml"), LAUNCHES)
def test_the_command_prints_one_line_and_exits_2_before_it_imports_torch(
    argument: str, yaml: str, tmp_path: Path, without_torch: dict[str, Any]
) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{yaml}\n")
    done = launch(argument, f"--config-dir={tmp_path}/conf", cwd=tmp_path, **without_torch)
    assert (done.code, done.output.count("\n")) == (2, 1)
    assert done.output.startswith(f"error: {LAUNCHES[argument, yaml]}")
    assert {path.name for path in tmp_path.iterdir()} == {"conf", "no"}


# --- what the launcher says ---------------------------------------------------------------------

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}


def test_torchruns_variables_give_the_place_among_the_ranks() -> None:
    assert read_environment({}) == Environment()
    place = read_environment(TORCHRUN)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (1, 4, 1, 2)
    assert (place.master_addr, place.master_port, place.under_torchrun) == ("10.0.0.1", 29400, True)


@pytest.mark.parametrize("missing", TORCHRUN)
def test_a_launchers_variable_that_is_missing_is_named(missing: str) -> None:
    variables = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(ConfigError, match=rf"=\d is set without {missing}: start with torchrun"):
        read_environment(variables)


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "4"), ("LOCAL_RANK", "2"), ("RANK", "-1"), ("WORLD_SIZE", "x")]
)
def test_a_launchers_variable_that_makes_no_sense_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}={value} "):
        read_environment(TORCHRUN | {name: value})


def test_half_of_a_launchers_variables_is_one_error(without_torch: dict[str, Any]) -> None:
    done = launch("model=lenet", RANK="1", **without_torch)
    assert (done.code, done.output.count("\n")) == (2, 1)
    assert done.output.startswith(
        "error: RANK=1 is set without WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_PORT"
    )


# --- what needs the number of ranks, the data or the directory ----------------------------------


def run_commands(
    commands: list[tuple[str, ...]], without: Sequence[str]
) -> list[tuple[Any, str, str]]:
    """Run command lines in this process, in which the packages `without` cannot be imported.

    Return the exit code, the stderr and the stdout of each.
    """
    command_line.RANK_0_SECONDS = 0.0  # nobody ends the other ranks here
    command_line.exit_rank = sys.exit  # this process goes on
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.freeze()  # or each shutdown takes a quarter of a second
    sys.modules.update(dict.fromkeys(without))  # type: ignore[arg-type]
    results: list[tuple[Any, str, str]] = []
    for command in commands:
        sys.argv = ["ddp_trainer", *command]
        with redirect_stderr(io.StringIO()) as stderr, redirect_stdout(io.StringIO()) as stdout:
            try:
                code: Any = __main__.main() or 0
            except SystemExit as left:
                code = left.code
        results.append((code, stderr.getvalue(), stdout.getvalue()))
        shutdown()
    return results


def refused(
    ranks: int,
    *commands: tuple[str, ...],
    code: int = 2,
    without: Sequence[str] = (),
    silent: bool = False,
) -> list[str]:
    """Return the error of each command line, after checking that it ends all ranks and is printed
    once.

    If `silent`, nothing else may be printed.
    """
    errors = []
    for (first, message, other), *others in zip(
        *on_ranks(ranks, run_commands, list(commands), without), strict=True
    ):
        assert [(first, "", ""), *others] == [(code, "", "")] * ranks, message
        assert not (silent and other)
        assert message.startswith("error: ")
        assert message.count("\n") == 1
        errors.append(message.removeprefix("error: ").rstrip())
    return errors


def test_all_ranks_refuse_and_rank_0_prints_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    expected = {
        ("epoch=3",): "epoch=3 is unknown: did you mean epochs?",
        ("global_batch_size=1",): "global_batch_size=1 must be at least the world size, 2: ",
        (
            "gradient_accumulation_steps=7",
        ): "gradient_accumulation_steps=7 must be at most the 6 samples of a rank: ",
        ("sync=none",): "sync=none runs in one process only, and there are 2 ranks: use sync=ddp",
        (
            "global_batch_size=97",
        ): "global_batch_size=97 must be at most the number of training samples, 96",
        ("device=cuda",): "device=cuda needs a GPU and none is visible: ",
        ("data.height=4",): "model=lenet needs images of at least 8×8 pixels",
        ("resume=must",): "resume=must needs a checkpoint and ",
        (
            "model=resnet18",
            "model.stem=imagenet",
            "global_batch_size=3",
        ): "global_batch_size=3 leaves a rank only one ",
        (
            f"output_dir={tmp_path}/file",
        ): f"output_dir={tmp_path}/file must be a folder that can be written: there is ",
    }
    errors = refused(2, *((*TINY, f"output_dir={tmp_path}", *overrides) for overrides in expected))
    for error, message in zip(errors, expected.values(), strict=True):
        assert error.startswith(message)
    [error] = refused(2, ("data=fashion_mnist", f"data.root={tmp_path}", f"output_dir={tmp_path}"))
    assert error.startswith(
        f"data.root={tmp_path}: {tmp_path}/train-images-idx3-ubyte.gz cannot be read (No such file"
        " or directory); put the four IDX files of Fashion-MNIST there"
    )


def test_a_run_directory_of_another_config_is_refused_by_naming_the_keys(tmp_path: Path) -> None:
    run = (*TINY, f"output_dir={tmp_path}", "name=run", "epochs=1")
    [error] = refused(2, (*run, "data.height=4"))  # leaves the directory to the corrected command
    assert error.startswith("model=lenet needs ")
    train_on(1, *run)
    assert refused(2, (*run, "optimizer.lr=0.3", "seed=1", "num_threads=2")) == [
        f"{tmp_path}/run holds a run of another config (optimizer.lr: 0.05 → 0.3; seed: 0 → 1):"
        " set these keys to their old values to continue it, choose name=… for a new run, or"
        " resume=never to start from step 0 (the old directory is renamed)"
    ]


@pytest.mark.fault("a second launch into a live run directory")
def test_a_second_launch_into_a_live_run_directory_is_refused(tmp_path: Path) -> None:
    overrides = (*TINY, f"output_dir={tmp_path}", "name=live")
    config = compose(*overrides)
    with lock_run_dir(tmp_path / "live", to_builtins(config), resume=config.resume):
        errors = refused(2, overrides, code=1)
    assert errors == [
        f"another launch is running in {tmp_path}/live: wait for it, stop it, or choose name=…"
    ]


@pytest.mark.parametrize(
    "text", ["]", "x: !!int ''", "x: !!bool y", "[]", "model: lenet", "model: {name: []}", "5: x"]
)
def test_a_damaged_config_of_a_run_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-00000008.pt").touch()
    (tmp_path / "config.yaml").write_text(text)
    config = compose(*TINY)
    message = f"{tmp_path}/config.yaml .*: restore it, or start anew with resume=never"
    with (
        pytest.raises(ConfigError, match=message),
        lock_run_dir(tmp_path, to_builtins(config), resume=config.resume),
    ):
        pass


@pytest.mark.parametrize("argument", ["epoch=3", "backend=nccl"])
def test_under_torchrun_the_error_is_printed_once(argument: str, tmp_path: Path) -> None:
    done = launch(*TINY, f"output_dir={tmp_path}", argument, ranks=2, CUDA_VISIBLE_DEVICES="")
    assert done.code == 1  # torchrun's own
    assert done.output.count("error: ") == 1, done.output
    assert f"error: {argument} " in done.output
    assert "ddp_trainer/" not in done.output, "a traceback of ours"


# --- the other commands -------------------------------------------------------------------------

COMMANDS = {
    "docter": "docter is not a command: did you mean doctor?",
    "doctor optimiser=sgd": "optimiser=sgd is unknown: did you mean optimizer?",
    "doctor size_mib=0": "size_mib=0 must be greater than 0",
    "doctor {folder}/lr=0.1": "{folder}/lr=0.1 is not a run directory",
    "plan {tiny}": "a single rank has no network to measure",
    "plan {tiny} latency_us=5": "bandwidth_mbit and latency_us must be given together",
    "plan {tiny} latency_us=5 bandwidth_mbit=0": "bandwidth_mbit=0.0 must be greater than 0",
    "plan {tiny} latency_us=5 bandwidth_mbit=10 ranks=2,x": (
        "ranks=2,x must be a list of whole numbers, such as [2, 4]"
    ),
    "benchmark {tiny} strategies=rung": "strategies=rung is not a valid choice: choose from ddp,",
    "benchmark {tiny} strategies=ddp,data_parallel": (
        "sync=data_parallel is for one process with GPUs"
    ),
    "benchmark {tiny} steps=0": "steps=0 must be greater than 0",
    "benchmark {tiny} rounds=few": "rounds=few must be a whole number",
    "benchmark {tiny} rounds=[1": "rounds=[1 cannot be read: the value must be YAML",
    "benchmark {tiny} --steps=3": "--steps=3: options have no dashes, steps=3",
    "benchmark {tiny} model=lenett": "model=lenett is not a valid choice",
    "verify": "verify takes one or two run directories",
    "verify {folder}/nowhere": "{folder}/nowhere is not a run directory",
    "evaluate": "evaluate takes one run directory",
    "evaluate {folder}/missing": "{folder}/missing is not a run directory",
    "evaluate {run} checkpoint=7": (
        "checkpoint=7 of {run} does not exist: choose from best, last, 20, "
    ),
    "evaluate {run} split=valid": "split=valid must be one of test, validation, train",
    "evaluate {run} split=validation": "split=validation does not exist: {run} held out no images",
    "evaluate {run} optimizer.lr=1": "optimizer.lr=1 would change what was trained",
    "evaluate {run} eval_batch=3": "eval_batch=3 is unknown: did you mean eval_batch_size",
    "evaluate {run} eval_batch_size=0": "eval_batch_size=0 must be greater than 0",
    "evaluate {run} eval_batch_size={{1": (
        "eval_batch_size={{1 cannot be read: the value must be YAML"
    ),
    "evaluate {run} device=cuda": "device=cuda needs a GPU",
    "predict {run}": "predict takes a run directory and images",
    "predict {run} {folder}/missing.png": (
        "{folder}/missing.png cannot be read (No such file or directory): give image "
        "files (quote spaces), a folder, or -"
    ),
    "predict {run} {folder}/{long}": "{folder}/{long} cannot be read (File name too long)",
    "predict {run} {folder}/none": "{folder}/none has no image",
    "predict {run} {folder} top=0": "top=0 must be greater than 0",
    "predict {folder} {run}": "{folder} is not a run directory",
    "export": "export takes one run directory",
    "export {run} format=tflite": (
        "format=tflite is not a valid choice; choose from safetensors, pt2, onnx"
    ),
    "export {run} check_images=-1": "check_images=-1 must be 0 or more",
    "export {run} format=onnx": "format=onnx needs onnxscript: pip install 'ddp_trainer[export]'",
    "train device=cpu output_dir={folder} data=imagefolder data.root={folder}/{long}": (
        "data.root={folder}/{long} must be a folder of images, and there is no such folder"
    ),
    "train device=cpu data={folder}/{long}": "data={folder}/{long} is not a valid choice: choose ",
    "train device=cpu output_dir={folder} data=fashion_mnist data.root={folder}/{long}": (
        "data.root={folder}/{long}: {folder}/{long}/train-images-idx3-ubyte.gz cannot be read (File"
    ),
    "train {tiny} model.weights={folder}/{long}": (
        "model.weights={folder}/{long} cannot be read (File name too long)"
    ),
    "train job_file={folder}/{long}": "job_file={folder}/{long} cannot be read (File name",
}


def run_without_rights(commands: list[tuple[str, ...]]) -> list[tuple[Any, str, str]]:
    """Run command lines as `run_commands` does; root may not read what its owner may not read."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # the version of capabilities, this process
    sets = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for number in (0, 1):  # effective, permitted
        sets[number] &= ~(1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH)
    assert libc.capset(header, sets) == 0
    return run_commands(commands, without=())


def test_a_folder_that_may_not_be_entered_is_one_error(tmp_path: Path) -> None:
    """A folder of somebody else, for which pathlib raises PermissionError in place of False."""
    closed = tmp_path / "closed"
    (closed / "train").mkdir(parents=True)
    weights = closed / "weights.pt"
    commands = {
        ("data=imagefolder", f"data.root={closed}"): f"{closed} cannot be read (Permission denied)",
        ("data=imagefolder", f"data.root={closed}/train"): (
            f"data.root={closed}/train must be a folder of images, and there is no such folder"
        ),
        ("data=fashion_mnist", f"data.root={closed}"): (
            f"data.root={closed}: {closed}/train-images-idx3-ubyte.gz cannot be read (Permission"
        ),
        (
            f"model.weights={weights}",
        ): f"model.weights={weights} cannot be read (Permission denied)",
        ("verify", str(closed)): f"{closed} is not a run directory",
    }
    closed.chmod(0)
    output = f"output_dir={tmp_path}"
    lines = [words if "verify" in words else ("device=cpu", output, *words) for words in commands]
    [results] = on_ranks(1, run_without_rights, lines)
    closed.chmod(0o700)
    for (code, error, _), message in zip(results, commands.values(), strict=True):
        assert (code, error.count("\n")) == (2, 1), error
        assert error.startswith(f"error: {message}")


def test_a_mistake_in_any_command_is_one_error(digits_run: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    tiny = " ".join([*TINY, f"output_dir={tmp_path}"])
    words = {"run": digits_run, "folder": tmp_path, "long": 300 * "x", "tiny": tiny}
    commands = [tuple(command.format(**words).split()) for command in COMMANDS]
    errors = refused(1, *commands, without=["onnxscript"], silent=True)
    for error, message in zip(errors, COMMANDS.values(), strict=True):
        assert error.startswith(message.format(**words))
