"""``export``: files that give the checkpoint's probabilities without this package."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_sets import write_fashion_mnist
from PIL import Image
from processes import run_command
from runs import train_on
from torch import nn

import ddp_trainer
from ddp_trainer.checkpoint.file import write_file
from ddp_trainer.commands import export
from ddp_trainer.tools.export import TOLERANCE
from ddp_trainer.tools.model_card import model_card
from ddp_trainer.tools.splits import example_images
from ddp_trainer.tools.trained_model import load_model, read_checkpoint

RESNET = """
model = torchvision.models.resnet18(num_classes=10)
model.conv1 = nn.Conv2d(1, 64, kernel_size=3, padding=1, bias=False)
model.maxpool = nn.Identity()
"""
LENET = """
model = nn.Sequential(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2),
                      nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),
                      nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10))
"""
MOBILENET = """
model = torchvision.models.mobilenet_v3_small(num_classes=10)
model.features[0][0] = nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False)
"""
TIMM = """
import timm
model = timm.create_model("resnet10t", num_classes=10, in_chans=1)
"""
MODELS = {
    ("model=lenet",): LENET,
    ("model=torchvision", "model.arch=mobilenet_v3_small"): MOBILENET,
    ("model=timm", "model.arch=resnet10t"): TIMM,
    ("model=resnet18",): RESNET,
}
CHOSEN = list(MODELS) if os.environ.get("MODELS") == "all" else list(MODELS)[:1]
"""All with MODELS=all: an export takes ten seconds."""
LOADED = """
import json, sys
sys.modules["ddp_trainer"] = None  # as if it were not installed
import numpy as np
import onnxruntime
import torch
import torchvision
from safetensors.torch import load_file
from torch import nn

images = np.load("images.npy")
torch.set_grad_enabled(False)
found = {{}}
session = onnxruntime.InferenceSession("model.onnx")
found["onnx"] = session.run(None, {{"images": images}})[0]
program = torch.export.load("model.pt2").module()
found["pt2"] = program(torch.from_numpy(images)).numpy()
{model}
model.load_state_dict(load_file("model.safetensors"))
pixels = (torch.from_numpy(images) / 255 - 0.286) / 0.353
found["safetensors"] = model.eval()(pixels).softmax(1).numpy()
names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
assert names[0] == "T-shirt/top", names
np.savez("found.npz", **found)
"""


def trained(folder: Path, *words: str) -> Path:
    """Train two steps, with 1,200 images held out, and return the run directory."""
    root = write_fashion_mnist(folder / "data", num_train=6000)
    train_on(
        1,
        *words,
        "data=fashion_mnist",
        f"data.root={root}",
        "data.validation_fraction=0.2",
        "precision=fp32",
        "global_batch_size=64",
        "max_steps=2",
        "logger=[]",
        f"output_dir={folder}",
        "name=run",
    )
    return folder / "run"


@pytest.fixture(scope="module")
def lenet_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("lenet"), "model=lenet")


@pytest.mark.parametrize("words", CHOSEN, ids=lambda words: words[-1])
def test_each_file_agrees_where_this_package_is_not_installed(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    run_dir = trained(tmp_path, *words)
    export.main([str(run_dir), "checkpoint=last"])
    images = torch.cat(example_images(load_model(run_dir, "last"), 1000))
    np.save(run_dir / "export/images.npy", images.numpy())
    done = run_command(
        [sys.executable, "-c", LOADED.format(model=MODELS[words])], cwd=run_dir / "export"
    )
    assert done.code == 0, done.output
    expected = ddp_trainer.load(run_dir, checkpoint="last").probabilities(images)
    assert len(images) == 1000
    with np.load(run_dir / "export/found.npz") as found:
        differences = {
            name: float(np.abs(found[name] - expected.numpy()).max()) for name in found.files
        }
    print(words, differences)
    assert sorted(differences) == ["onnx", "pt2", "safetensors"]
    assert max(differences.values()) <= TOLERANCE


def test_a_file_that_differs_is_not_kept(lenet_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (lenet_run / "export").mkdir(exist_ok=True)
    (lenet_run / "export/model.safetensors").write_text("old")
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: torch.rand(len(x), self.out_features))
    with pytest.raises(SystemExit, match=r"^2$"):
        export.main([str(lenet_run), "checkpoint=last", "format=safetensors"])
    assert (lenet_run / "export/model.safetensors").read_text() == "old"
    assert not list((lenet_run / "export").glob(".*.writing"))


def test_the_model_card_has_what_others_need(lenet_run: Path) -> None:
    export.main([str(lenet_run), "checkpoint=last", "format=safetensors", "check_images=50"])
    text = (lenet_run / "export/model_card.md").read_text()
    summary = json.loads((lenet_run / "summary.json").read_text())
    parts = [
        "uint8 [N, 1, 28, 28]",
        f"top-1 {summary['eval/top1']:.4f}",
        "1,200 validation images",
        "9. `Ankle boot`",
    ]
    parts += [
        "on 50 images",
        "name: fashion_mnist",
        f"- torch {torch.__version__.partition('+')[0]}",
        "step 2",
    ]
    for part in parts:
        assert part in text, part
    assert "onnx" not in text
    assert not re.search(r"\d{12}", text), "a number with more digits than anybody reads"


@pytest.mark.parametrize("center_crop", [1, 0.875, "stretch"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(301, 200), (200, 301), (28, 28)])
def test_the_recipe_of_the_model_card_turns_a_picture_into_the_input(
    lenet_run: Path, tmp_path: Path, center_crop: float | str, channels: int, size: tuple[int, int]
) -> None:
    trained = load_model(lenet_run, "last")
    preprocessing = trained.preprocessing._replace(
        center_crop=center_crop, image_shape=(channels, 24, 32)
    )
    card = model_card(trained._replace(preprocessing=preprocessing), {}, 0)
    [recipe] = re.findall(r"From a picture to the input:\n\n```python\n(.*?)```", card, re.DOTALL)
    assert recipe.count("\n") <= 10
    x, y = np.meshgrid(np.linspace(0, 250, size[0]), np.linspace(0, 250, size[1]))
    picture = np.stack([x, y, 250 - x], axis=-1).astype(np.uint8)
    Image.fromarray(picture).save(tmp_path / "picture.png")
    names: dict[str, Any] = {}
    exec(recipe.replace("picture.jpg", str(tmp_path / "picture.png")), names)
    expected = preprocessing.prepare(torch.from_numpy(picture).movedim(-1, 0)).numpy()
    assert names["images"].shape == (1, channels, 24, 32)
    assert abs(names["images"][0].astype(int) - expected).max() <= 2


def test_the_model_card_of_a_data_set_that_does_not_say_how_it_prepares(lenet_run: Path) -> None:
    trained = load_model(lenet_run, "last")
    unknown = trained.preprocessing._replace(center_crop=None)
    card = model_card(trained._replace(preprocessing=unknown), {}, 0)
    assert "prepare it as the data set of the training did" in card
    assert "From a picture to the input" not in card


def test_no_text_of_somebody_else_is_more_than_text_in_the_model_card(lenet_run: Path) -> None:
    trained = load_model(lenet_run, "last")
    names = ["<img src=x>", "[a](b)", "a`b``c", "red\x1b[31m", "x\n# y", "\udcff", "`", "Käfer", ""]
    data = replace(trained.config.data, root="x ```\n```\n# y")
    hostile = trained._replace(class_names=names, config=replace(trained.config, data=data))
    card = model_card(hostile, {}, 0)
    classes = card.partition("## Classes\n")[2].partition("\n## Config\n")[0].split("\n")
    assert classes[1:-1] == [
        "0. `<img src=x>`",
        "1. `[a](b)`",
        "2. ```` a`b``c ````",
        "3. `red\\x1b[31m`",
        "4. `x\\n# y`",
        "5. `\\udcff`",
        "6. `` ` ``",
        "7. `Käfer`",
        "8. ``",
    ]
    config = card.partition("\n## Config\n\n")[2].partition("\n\n## Versions")[0].splitlines()
    assert all(not line or line.startswith("    ") for line in config)


def test_without_the_data_the_comparison_can_be_left_out(
    lenet_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        str(lenet_run),
        "format=safetensors",
        f"data.root={tmp_path}/missing",
        "checkpoint=last",
    ]
    with pytest.raises(SystemExit, match=r"^2$"):
        export.main(words)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: data.root={tmp_path}/missing: ")
    export.main([*words, "check_images=0"])
    assert "not compared with the checkpoint" in (lenet_run / "export/model_card.md").read_text()


def test_a_checkpoint_of_somebody_else_reads_no_environment_variable(
    lenet_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "the-secret")
    path, state = read_checkpoint(lenet_run, "last")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    config = state["config"] | {"name": "${oc.env:TOKEN}"}
    write_file(tmp_path / "run/checkpoints" / path.name, state | {"config": config})
    export.main([str(tmp_path / "run"), "format=safetensors", "check_images=0"])
    card = (tmp_path / "run/export/model_card.md").read_text()
    assert "${oc.env:TOKEN}" in card
    assert "the-secret" not in card


def test_what_a_killed_export_has_left_is_removed(lenet_run: Path, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export/.0123456789abcdef.writing").write_bytes(bytes(1000))
    words = [str(lenet_run), "checkpoint=last", "format=safetensors"]
    export.main([*words, f"output={tmp_path}/export"])
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == [
        ".lock",
        "model.safetensors",
        "model_card.md",
    ]
