"""Models of torchvision and timm: any classifier trains, resumes and takes the images that
it can.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import launch
from runs import TINY, assert_bitwise, newest_checkpoint, train_all, train_on, trained_state
from torch import nn
from torchvision import models

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.models import ModelConfig, TimmModelConfig, TorchvisionModelConfig
from ddp_trainer.models import build_model
from ddp_trainer.models.fine_tuning import head_names, load_weights
from ddp_trainer.models.weights import load_state

TORCHVISION = models.list_models(module=models)
SMALL = {
    "torchvision": ["squeezenet1_1", "efficientnet_b0"],
    "timm": ["vit_tiny_patch16_224", "convnext_atto"],
}
"""A few of each library that are small; among them dropout, stochastic depth and layers without
BatchNorm.
"""
TIMM = [
    "beit_base_patch16_224",
    "cait_xxs24_224",
    "coat_tiny",
    "convit_tiny",
    "convmixer_768_32",
    "convnext_atto",
    "crossvit_tiny_240",
    "cspresnet50",
    "deit_tiny_patch16_224",
    "densenet121",
    "dla34",
    "dpn48b",
    "edgenext_xx_small",
    "efficientformer_l1",
    "efficientnet_b0",
    "fastvit_t8",
    "ghostnet_050",
    "hrnet_w18_small",
    "inception_next_atto",
    "levit_128s",
    "maxvit_tiny_tf_224",
    "mixer_s32_224",
    "mobilenetv3_small_050",
    "mobilenetv4_conv_small",
    "mobilevit_xxs",
    "poolformer_s12",
    "pvt_v2_b0",
    "regnetx_002",
    "repvgg_a0",
    "res2net50_14w_8s",
    "resnest14d",
    "resnet10t",
    "seresnext26d_32x4d",
    "swin_tiny_patch4_window7_224",
    "vit_tiny_patch16_224",
    "xcit_nano_12_p16_224",
]
"""Models across the families of timm."""
LARGEST = ("vit_h_14",)
"""Models that two ranks with momentum cannot train in 23 GB."""
CHOSEN = {"torchvision": TORCHVISION, "timm": TIMM} if os.environ.get("MODELS") == "all" else SMALL


def config(library: str, arch: str) -> ModelConfig:
    return (
        TorchvisionModelConfig(arch=arch)
        if library == "torchvision"
        else TimmModelConfig(arch=arch)
    )


def build(
    library: str, arch: str, *, side: int = 224, channels: int = 3, num_classes: int = 7
) -> nn.Module:
    return build_model(
        config(library, arch), image_shape=(channels, side, side), num_classes=num_classes
    )


def words(
    library: str, arch: str, *, side: int, channels: int = 3, batch: int = 4
) -> tuple[str, ...]:
    mean = [0.5] * channels
    std = [0.25] * channels
    return (
        f"model={library}",
        f"model.arch={arch}",
        "data=synthetic",
        f"data.num_train={batch * 2}",
        "data.num_eval=2",
        f"data.height={side}",
        f"data.width={side}",
        f"data.channels={channels}",
        f"data.mean={mean}",
        f"data.std={std}",
        f"global_batch_size={batch}",
        "eval_batch_size=2",
        "precision=fp32",
        "optimizer.lr=0.001",
        "epochs=1",
        "checkpoint.keep_best=false",
        "logger=[]",
    )


def assert_trains_and_resumes(
    library: str, arch: str, folder: Path, *, side: int, deadline: float = 120
) -> None:
    """Take two steps on two ranks, whole and with a stop after the first, and compare the two."""
    momentum = ("optimizer.momentum=0", "optimizer.nesterov=false") if arch in LARGEST else ()
    common = (*words(library, arch, side=side), f"output_dir={folder}", *momentum)
    train_all(
        2,
        [(*common, "name=whole"), (*common, "name=parts", "max_steps=1"), (*common, "name=parts")],
        deadline=deadline,
    )
    whole, parts = (newest_checkpoint(folder / name) for name in ("whole", "parts"))
    assert whole["step"] == 2
    assert_bitwise(whole["model"], parts["model"])
    assert_bitwise(whole["optimizer"], parts["optimizer"])
    for name in ("whole", "parts"):  # all models together are 90 GB
        shutil.rmtree(folder / name)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("library", "arch"), [(library, arch) for library, names in CHOSEN.items() for arch in names]
)
def test_a_model_trains_and_resumes(library: str, arch: str, tmp_path: Path) -> None:
    """Train with MODELS=all every model of torchvision and TIMM, which takes an hour."""
    side = next(side for side in (64, 96, 224, 240, 256, 299) if takes(library, arch, side))
    assert_trains_and_resumes(library, arch, tmp_path, side=side, deadline=1000)


def takes(library: str, arch: str, side: int) -> bool:
    try:
        build(library, arch, side=side)
    except ConfigError:
        return False
    return True


def test_a_model_of_torchvision_is_torchvisions() -> None:
    ours = build("torchvision", "resnet18")
    theirs = models.resnet18(num_classes=7)
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(ours.eval()(images), theirs.eval()(images))


def test_a_state_needs_no_versions_of_its_modules() -> None:
    model, other = (build("torchvision", "mnasnet0_5", side=64) for _ in range(2))
    tensors = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ValueError, match="version"):  # of torch itself
        model.load_state_dict(tensors)
    load_state(model, tensors)
    assert_bitwise(tensors, dict(model.state_dict()))


def test_a_model_of_timm_is_timms() -> None:
    import timm  # here, because each worker of pytest imports this file

    ours = build("timm", "resnet10t")
    theirs = timm.create_model("resnet10t", num_classes=7)
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(ours.eval()(images), theirs.eval()(images))


@pytest.mark.parametrize(
    ("library", "arch", "side"),
    [
        ("torchvision", "resnet18", 32),
        ("torchvision", "squeezenet1_1", 64),
        ("torchvision", "vit_b_32", 64),
        ("timm", "resnet10t", 32),
        ("timm", "vit_tiny_patch16_224", 48),
    ],
)
def test_images_may_have_other_sizes_and_channels(library: str, arch: str, side: int) -> None:
    for channels in (1, 4):
        model = build(library, arch, side=side, channels=channels)
        assert model.training
        assert model.eval()(torch.zeros(2, channels, side, side)).shape == (2, 7)


@pytest.mark.parametrize(
    ("library", "arch", "side", "expected"),
    [
        (
            "torchvision",
            "resnet19",
            64,
            "model.arch=resnet19 is not a model of torchvision: did you mean ",
        ),
        ("timm", "resnet10x", 64, "model.arch=resnet10x is not a model of timm: did you mean "),
        (
            "torchvision",
            "alexnet",
            32,
            "model.arch=alexnet does not take images of the shape (3, 32, 32) (",
        ),
        (
            "torchvision",
            "vit_b_16",
            50,
            "model.arch=vit_b_16 does not take images of the shape (3, 50, 50) (",
        ),
    ],
)
def test_what_cannot_be_built_is_one_error(
    library: str, arch: str, side: int, expected: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build(library, arch, side=side)
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)
    if "did you mean" in expected:
        assert arch[:-1] in str(error.value).partition("did you mean")[2]


def test_dropout_draws_the_same_after_a_stop_and_differs_over_ranks_and_steps(
    tmp_path: Path,
) -> None:
    common = (
        *TINY,
        "data.height=64",
        "data.width=64",
        "model=torchvision",
        "model.arch=squeezenet1_1",
        "epochs=1",
        "optimizer.lr=0.01",
        f"output_dir={tmp_path}",
    )
    train_on(2, *common, "name=whole")
    for _ in range(2):
        train_on(2, *common, "name=parts", "max_steps=3")
    train_on(2, *common, "name=parts")
    assert_bitwise(trained_state(tmp_path / "whole"), trained_state(tmp_path / "parts"))


# --- fine-tuning --------------------------------------------------------------------------------


def lenet_words(folder: Path, name: str, *more: str) -> tuple[str, ...]:
    return (*TINY, f"output_dir={folder}", f"name={name}", *more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a run on ten classes."""
    folder = tmp_path_factory.mktemp("trained")
    train_on(1, *lenet_words(folder, "run"))
    return folder / "run/checkpoints/step-00000016.pt"


def save_as(kind: str, checkpoint: Path, folder: Path) -> Path:
    """Write the weights in another format and return the file."""
    from safetensors.torch import save_file

    state = torch.load(checkpoint, weights_only=True)["model"]
    path = folder / f"weights.{'safetensors' if kind == 'safetensors' else 'pth'}"
    match kind:
        case "checkpoint":
            return checkpoint
        case "safetensors":
            save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
        case "state_dict":
            torch.save(state, path)
        case "of DDP":
            torch.save({f"module.{name}": tensor for name, tensor in state.items()}, path)
        case "of Lightning" | "of Lightning and torch.compile":
            prefix = "model." if kind == "of Lightning" else "model._orig_mod."
            torch.save(
                {"epoch": 3, "state_dict": {f"{prefix}{name}": t for name, t in state.items()}},
                path,
            )
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "checkpoint",
        "safetensors",
        "state_dict",
        "of DDP",
        "of Lightning",
        "of Lightning and torch.compile",
    ],
)
@pytest.mark.parametrize("num_classes", [10, 4])
def test_a_run_begins_with_the_weights_of_a_file(
    kind: str, num_classes: int, trained: Path, tmp_path: Path
) -> None:
    path = save_as(kind, trained, tmp_path)
    train_on(
        1,
        *lenet_words(
            tmp_path,
            "run",
            f"model.weights={path}",
            f"data.num_classes={num_classes}",
            "max_steps=1",
            "optimizer.lr=1e-12",
            "optimizer.weight_decay=0",
        ),
    )
    before, after = (
        torch.load(p, weights_only=True)["model"]
        for p in (trained, tmp_path / "run/checkpoints/step-00000001.pt")
    )
    head = {name for name in before if before[name].shape != after[name].shape}
    assert len(head) == (0 if num_classes == 10 else 2)
    for name in before.keys() - head:
        torch.testing.assert_close(before[name], after[name], rtol=0, atol=1e-9)
    log = (tmp_path / "run/train.log").read_text()
    assert (
        "randomly initialized:"
        f" {'none' if num_classes == 10 else ', '.join(name for name in before if name in head)}"
        in log
    )


@pytest.mark.parametrize("arch", ["googlenet", "inception_v3"])
def test_the_auxiliary_classifiers_of_a_file_are_left_out(arch: str, tmp_path: Path) -> None:
    theirs = models.get_model(arch, num_classes=9, aux_logits=True, init_weights=False).state_dict()
    torch.save(theirs, tmp_path / "weights.pth")
    model = build("torchvision", arch, side=96)
    load_weights(model, str(tmp_path / "weights.pth"), num_classes=7)
    ours = model.state_dict()
    assert len(ours) < len(theirs)
    assert all(
        torch.equal(tensor, theirs[name])
        for name, tensor in ours.items()
        if not name.startswith("fc.")
    )


def test_frozen_parameters_and_their_statistics_stay(tmp_path: Path) -> None:
    common = (
        *words("torchvision", "mobilenet_v3_small", side=32),
        f"output_dir={tmp_path}",
        "optimizer.lr=0.1",
    )
    train_all(
        2,
        [
            (*common, "name=start", "max_steps=1", "optimizer.lr=1e-30"),
            (*common, "name=frozen", "model.freeze=[backbone]"),
            (*common, "name=part", "model.freeze=[features.0,features.1]"),
        ],
    )
    start, frozen, part = (
        newest_checkpoint(tmp_path / name)["model"] for name in ("start", "frozen", "part")
    )
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    changed = {
        n
        for n in start
        if not n.endswith(statistics) and not torch.allclose(start[n], frozen[n], rtol=0)
    }
    assert changed == {"classifier.3.weight", "classifier.3.bias"}
    assert not {
        name for name in frozen if name.endswith("num_batches_tracked") and frozen[name] != 0
    }
    assert torch.equal(frozen["features.0.1.running_mean"], torch.zeros(16))
    kept = {
        n
        for n in part
        if n.startswith(("features.0.", "features.1.")) and not n.endswith(statistics)
    }
    assert all(torch.allclose(start[name], part[name], rtol=0) for name in kept)
    assert not torch.equal(start["features.12.0.weight"], part["features.12.0.weight"])


WRONG = {
    "model.weights={file} cannot be read (": ("model.weights={folder}/missing.pth",),
    "model.weights={file} has no weights": ("model.weights={folder}/list.pth",),
    "model.weights={file} does not match the model: ": (
        "model.weights={trained}",
        "data.height=28",
        "data.width=28",
    ),
    "model.freeze=layer matches no parameter; choose from backbone, ": ("model.freeze=[layer]",),
    "the model has no parameter that needs a gradient": ("model.freeze=[backbone,'{last}']",),
}


@pytest.mark.parametrize("expected", WRONG)
def test_what_does_not_fit_is_one_line_and_exit_2(
    expected: str, trained: Path, tmp_path: Path
) -> None:
    torch.save([1, 2], tmp_path / "list.pth")
    last = list(torch.load(trained, weights_only=True)["model"])[-1].partition(".")[0]
    overrides = [
        word.format(folder=tmp_path, trained=trained, last=last) for word in WRONG[expected]
    ]
    done = launch(*lenet_words(tmp_path, "run", *overrides))
    assert done.code == 2, done.output
    file = overrides[0].partition("=")[2]
    [line] = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {expected.format(file=file)}"), line


def test_a_pickle_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    marker = tmp_path / "executed"

    class Executed:
        def __reduce__(self) -> Any:
            return (Path.write_text, (marker, "executed"))

    torch.save({"weight": Executed()}, tmp_path / "weights.pth")
    done = launch(*lenet_words(tmp_path, "run", f"model.weights={tmp_path}/weights.pth"))
    assert done.code == 2, done.output
    assert not marker.exists()
    assert json.dumps(done.output).count("error: ") == 1


def test_a_parameter_without_dimensions_is_no_part_of_the_last_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 10), nn.Module())
    model[1].register_parameter("scale", nn.Parameter(torch.ones(())))
    assert head_names(model, 10) == {"0.weight", "0.bias"}
