"""Export a trained model as safetensors, ``torch.export`` and ONNX, and check the files."""

import json
from collections.abc import Callable
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.data.augmentation import Normalize
from ddp_trainer.models.weights import load_state
from ddp_trainer.output import OTHER_OUTPUT, output_file, output_folder
from ddp_trainer.tools.model_card import model_card
from ddp_trainer.tools.splits import example_images
from ddp_trainer.tools.trained_model import TrainedModel

TOLERANCE = 1e-5
"""The maximum difference between a probability of a file and that of the checkpoint."""

Probabilities = Callable[[Tensor], Tensor]


class ExportedModel(nn.Module):
    """Returns probabilities, float32 [N, classes], for images, uint8 [N, C, H, W]."""

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        self.model = trained.model
        self.normalize = Normalize(trained.preprocessing.mean, trained.preprocessing.std)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(self.normalize(images)).softmax(1)


class Exporter:
    """Writes a trained model to files; each method reads its file again and returns this model."""

    def __init__(self, trained: TrainedModel) -> None:
        self.model = ExportedModel(trained).eval()
        self.image_shape = trained.preprocessing.image_shape
        self.metadata = {
            "class_names": json.dumps(trained.class_names),
            "preprocessing": json.dumps(trained.preprocessing._asdict()),
            "model": json.dumps(to_builtins(trained.config.model)),
            "step": str(trained.step),
        }

    @cached_property
    def program(self) -> Any:
        """The model as a program of ``torch.export``, for batches of any size."""
        example = torch.zeros(2, *self.image_shape, dtype=torch.uint8)
        batch = torch.export.Dim("batch", min=1)
        return torch.export.export(self.model, (example,), dynamic_shapes={"images": {0: batch}})

    def write_safetensors(self, path: Path) -> Probabilities:
        """Write weights and metadata to `path`; return the model with the weights of this file."""
        from safetensors.torch import load_file, save

        weights = self.model.model
        state = {name: value.clone().contiguous() for name, value in weights.state_dict().items()}
        path.write_bytes(save(state, metadata={"format": "pt", **self.metadata}))
        load_state(weights, load_file(path))
        return self.model

    def write_pt2(self, path: Path) -> Probabilities:
        """Write the program and the metadata to `path`; return the module read from this file."""
        extra = {"metadata.json": json.dumps(self.metadata)}
        with open(path, "wb") as file:
            torch.export.save(self.program, file, extra_files=extra)
        with open(path, "rb") as file:
            return torch.export.load(file).module()

    def write_onnx(self, path: Path) -> Probabilities:
        """Write the program as ONNX to `path`; return a function that runs this file on images."""
        import onnxruntime

        exported: Any = torch.onnx.export(
            self.program,
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=["probabilities"],
            dynamic_shapes={"images": {0: "batch"}},
        )
        exported.model.metadata_props.update(self.metadata)
        exported.save(path, external_data=False)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


class Format(NamedTuple):
    """A format of an exported file: the packages that it needs, and its writer."""

    packages: list[str]
    write: Callable[[Exporter, Path], Probabilities]


FORMATS = {
    "safetensors": Format(["safetensors"], Exporter.write_safetensors),
    "pt2": Format([], Exporter.write_pt2),
    "onnx": Format(["onnx", "onnxscript", "onnxruntime"], Exporter.write_onnx),
}


def check_formats(formats: list[str]) -> None:
    """Check that all `formats` exist and that their packages are installed; ConfigError if not."""
    for name in formats:
        require(
            name in FORMATS,
            f"format={name} is not a valid choice; choose from {', '.join(FORMATS)}",
        )
        missing = [package for package in FORMATS[name].packages if find_spec(package) is None]
        fix = "pip install 'ddp_trainer[export]', or leave the format out"
        require(not missing, f"format={name} needs {', '.join(missing)}: {fix}")


def export_model(
    trained: TrainedModel, folder: Path, formats: list[str], *, num_images: int
) -> list[str]:
    """Lock `folder`, write the model to it, and return a line for each file: see `write_files`."""
    check_formats(formats)
    batches = example_images(trained, num_images)
    with output_folder(folder):
        return write_files(trained, folder, formats, batches)


@torch.no_grad()
def write_files(
    trained: TrainedModel, folder: Path, formats: list[str], batches: list[Tensor]
) -> list[str]:
    """Write the model in each format, and its model card, to `folder`; return a line for each file.

    batches: images, uint8 [N, C, H, W] each, on which the probabilities of a file must agree with
    those of the checkpoint; none: no comparison.

    Raises:
        ConfigError: the data or a format cannot be used, the probabilities of a file differ by more
        than `TOLERANCE`, or a file cannot be written.
        TransientError: the disk is full or does not answer.
    """
    count = sum(map(len, batches))
    exporter = Exporter(trained)
    expected = in_batches(exporter.model, batches)
    trained.check_finite(expected)
    differences = {}
    lines = []
    for name in formats:
        path = folder / f"model.{name}"
        with output_file(path, fix=OTHER_OUTPUT) as file:
            try:
                probabilities = in_batches(FORMATS[name].write(exporter, Path(file.name)), batches)
            except OSError:
                raise
            except Exception as error:  # because exporters raise many types
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                raise ConfigError(
                    f"format={name} is not possible for model={trained.config.model.name}: {reason}"
                ) from error
            change = (probabilities - expected).abs()
            differences[name] = float(change.max()) if count else 0.0
            require(
                differences[name] <= TOLERANCE,
                f"{path} was not written: on {count:,} images its probabilities differ from the"
                f" checkpoint's by {differences[name]:.1e}, and at most {TOLERANCE:.0e} is allowed:"
                " choose other formats with format=…, or set check_images=0 to compare nothing",
            )
        compared = f"differs by at most {differences[name]:.1e} on {count:,} images"
        result = compared if count else "not compared"
        lines.append(f"wrote {path} ({path.stat().st_size / 1e6:,.1f} MB, {result})")

    path = folder / "model_card.md"
    with output_file(path, fix=OTHER_OUTPUT) as file:
        file.write(model_card(trained, differences, count).encode(errors="replace"))
    return [*lines, f"wrote {path}"]


def in_batches(probabilities: Probabilities, batches: list[Tensor]) -> Tensor:
    """Return the results of `probabilities` for all `batches` as one tensor, [N, classes]."""
    return torch.cat([torch.empty(0), *map(probabilities, batches)])
