"""Exports of a trained model as safetensors, ``torch.export`` and ONNX, which are checked."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import ConfigError, path_error, require
from ddp_trainer.data.normalize import Normalize
from ddp_trainer.files import replace_file
from ddp_trainer.models.weights import load_state
from ddp_trainer.tools.model_card import model_card
from ddp_trainer.tools.preprocessing import Preprocessing
from ddp_trainer.tools.splits import example_images
from ddp_trainer.tools.trained_model import TrainedModel

TOLERANCE = 1e-5
"""The largest allowed difference of a probability from the checkpoint's."""
PACKAGES = {
    "safetensors": ["safetensors"],
    "pt2": [],
    "onnx": ["onnx", "onnxscript", "onnxruntime"],
}
"""The packages that each format of an exported file needs."""
CHECK_BATCH = 64

Probabilities = Callable[[Tensor], Tensor]
Program = Callable[[], Any]
"""A function that returns the model as a ``torch.export.ExportedProgram``."""


class ExportedModel(nn.Module):
    """Returns probabilities, float32 [N, classes], for images, uint8 [N, C, H, W]."""

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.model = model
        self.normalize = Normalize(preprocessing.mean, preprocessing.std)
        self.image_shape = preprocessing.image_shape

    def forward(self, images: Tensor) -> Tensor:
        return self.model(self.normalize(images)).softmax(1)


def check_formats(formats: list[str]) -> None:
    """Check that all `formats` exist and that their packages are installed; ConfigError if not."""
    for name in formats:
        require(
            name in PACKAGES,
            f"format={name} is not a valid choice; choose from {', '.join(PACKAGES)}",
        )
        missing = [package for package in PACKAGES[name] if find_spec(package) is None]
        fix = "pip install 'ddp_trainer[export]', or leave the format out"
        require(not missing, f"format={name} needs {', '.join(missing)}: {fix}")


@torch.no_grad()
def export_model(trained: TrainedModel, formats: list[str], *, num_images: int) -> list[str]:
    """Write the model in each format, and its model card, to export/; return a line for each file.

    num_images: the number of images on which the probabilities of a file must agree with those of
    the checkpoint; 0: no comparison.

    Raises:
        ConfigError: the data or a format cannot be used, a file differs by more than `TOLERANCE`,
        or cannot be written.
        TransientError: the disk is full or does not answer.
    """
    check_formats(formats)
    images = example_images(trained, num_images)
    folder = trained.run_dir / "export"
    model = ExportedModel(trained.model, trained.preprocessing).eval()
    expected = in_batches(model, images)
    program = cache(lambda: export_program(model))
    differences = {}
    lines = []
    for name in formats:
        path = folder / f"model.{name}"
        with new_file(path) as temporary, exporter_errors(f"format={name}", trained):
            probabilities = WRITERS[name](trained, model, program, temporary)
            change = (in_batches(probabilities, images) - expected).abs()
            differences[name] = float(change.max()) if len(images) else 0.0
            require(
                differences[name] <= TOLERANCE,
                f"{path} was not written: on {len(images)} images its probabilities differ from the"
                f" checkpoint's by {differences[name]:.1e}, and at most {TOLERANCE:.0e} is allowed:"
                " choose another format",
            )
        compared = f"differs by at most {differences[name]:.1e} on {len(images):,} images"
        result = compared if len(images) else "not compared"
        lines.append(f"wrote {path} ({path.stat().st_size / 1e6:,.1f} MB, {result})")

    path = folder / "model_card.md"
    with new_file(path) as temporary:
        temporary.write_text(model_card(trained, differences, len(images)), encoding="utf-8")
    return [*lines, f"wrote {path}"]


@contextmanager
def exporter_errors(setting: str, trained: TrainedModel) -> Iterator[None]:
    """Turn an exception of an exporter, which may be of any kind, into a ConfigError."""
    try:
        yield
    except (ConfigError, OSError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"{setting} is not possible for model={trained.config.model.name}: {reason}"
        ) from error


def in_batches(probabilities: Probabilities, images: Tensor) -> Tensor:
    """Return the results of `probabilities` for `images`, in batches, as one tensor."""
    parts = images.split(CHECK_BATCH) if len(images) else ()
    return torch.cat([torch.empty(0), *map(probabilities, parts)])


def export_program(model: ExportedModel) -> Any:
    """Return the program that ``torch.export`` makes of `model`, for batches of any size."""
    example = torch.zeros(2, *model.image_shape, dtype=torch.uint8)
    return torch.export.export(
        model, (example,), dynamic_shapes={"images": {0: torch.export.Dim("batch", min=1)}}
    )


def write_safetensors(
    trained: TrainedModel, model: ExportedModel, program: Program, path: Path
) -> Probabilities:
    """Write weights and metadata to `path`; return `model` with the weights of this file."""
    from safetensors.torch import load_file, save

    state = {name: value.clone().contiguous() for name, value in model.model.state_dict().items()}
    path.write_bytes(save(state, metadata={"format": "pt", **metadata(trained)}))
    load_state(model.model, load_file(path))
    return model


def write_pt2(
    trained: TrainedModel, model: ExportedModel, program: Program, path: Path
) -> Probabilities:
    """Write `program` and the metadata to `path`; return the module read from this file."""
    with open(path, "wb") as file:
        torch.export.save(
            program(), file, extra_files={"metadata.json": json.dumps(metadata(trained))}
        )
    with open(path, "rb") as file:
        return torch.export.load(file).module()


def write_onnx(
    trained: TrainedModel, model: ExportedModel, program: Program, path: Path
) -> Probabilities:
    """Write `program` as ONNX to `path`; return a function that runs this file on images."""
    import onnxruntime

    exported: Any = torch.onnx.export(
        program(),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=["probabilities"],
        dynamic_shapes={"images": {0: "batch"}},
    )
    exported.model.metadata_props.update(metadata(trained))
    exported.save(path, external_data=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


WRITERS: Mapping[str, Callable[[TrainedModel, ExportedModel, Program, Path], Probabilities]] = {
    "safetensors": write_safetensors,
    "pt2": write_pt2,
    "onnx": write_onnx,
}


def metadata(trained: TrainedModel) -> dict[str, str]:
    """Return the metadata of an exported file, each value as JSON text."""
    return {
        "class_names": json.dumps(trained.class_names),
        "preprocessing": json.dumps(asdict(trained.preprocessing)),
        "model": json.dumps(to_builtins(trained.config.model)),
        "step": str(trained.step),
    }


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to `path` if no error is raised.

    Raises:
        ConfigError, TransientError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as file:
            yield Path(file.name)
    except OSError as error:
        raise path_error(error, f"{path} cannot be written: {error.strerror or error}") from error
