"""``export``: files that give the checkpoint's probabilities without this package."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from image_sets import write_fashion_mnist
from processes import run_command
from runs import train_on
from torch import nn

import ddp_trainer
from ddp_trainer.commands import export
from ddp_trainer.tools.export import TOLERANCE
from ddp_trainer.tools.splits import example_images
from ddp_trainer.tools.trained_model import load_model

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
    images = example_images(load_model(run_dir, "last"), 1000)
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
    assert not list((lenet_run / "export").glob(".*"))


def test_the_model_card_has_what_others_need(lenet_run: Path) -> None:
    export.main([str(lenet_run), "checkpoint=last", "format=safetensors", "check_images=50"])
    text = (lenet_run / "export/model_card.md").read_text()
    summary = json.loads((lenet_run / "summary.json").read_text())
    parts = [
        "uint8 [N, 1, 28, 28]",
        f"top-1 {summary['eval/top1']:.4f}",
        "1,200 validation images",
        "9. Ankle boot",
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
    assert line.startswith(f"error: data.root={tmp_path}/missing must be")
    export.main([*words, "check_images=0"])
    assert "not compared with the checkpoint" in (lenet_run / "export/model_card.md").read_text()
