"""Write the model of a run to files that other programs read:

    python -m ddp_trainer export outputs/pets
    python -m ddp_trainer export outputs/pets format=onnx checkpoint=last preprocessing=outside

Writes export/model.safetensors, export/model.pt2 (torch.export) and export/model.onnx in the run
directory, or only those that the option format lists, and export/model_card.md, which explains how
to use them. By default the pt2 and onnx models normalize the images themselves; with
preprocessing=outside, the calling program must do so. A file is kept only if its probabilities
differ by at most 1e-5 from those of the checkpoint on 1,000 images of the split on which the
training evaluated. Config keys that do not change the trained model can be set too, for example
data.root.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ddp_trainer.commands.command_line import errors_as_exit_codes
from ddp_trainer.commands.options import CheckpointOptions, parse_options, split_paths
from ddp_trainer.config.errors import NOT_NEGATIVE, require
from ddp_trainer.distributed.environment import installed_versions, read_environment
from ddp_trainer.runtime import disable_gc


class Place(Enum):
    """The place of the preprocessing: inside the exported files, or outside, in the program that
    uses them.
    """

    inside = "inside"
    outside = "outside"


@dataclass(kw_only=True, slots=True)
class ExportOptions(CheckpointOptions):
    """The options of the command."""

    format: str = "safetensors,pt2,onnx"
    """The formats of the files to write, separated by commas."""
    preprocessing: Place = Place.inside
    """inside: the files take uint8 images [N, C, H, W]; outside: normalized float32. No effect on
    safetensors.
    """
    check_images: int = field(default=1000, metadata=NOT_NEGATIVE)
    """Images on which each file is compared with the checkpoint; 0: no comparison, for a machine
    without the data.
    """


def main(words: Sequence[str]) -> None:
    """Export a model; exit with 2 for wrong input, with 1 for any other failure."""
    with errors_as_exit_codes():
        options, rest = parse_options(
            ExportOptions, words, usage="export RUN_DIR [key=value …]", description=__doc__
        )
        paths, overrides = split_paths(rest)
        require(len(paths) == 1, "export takes one run directory: export RUN_DIR")
        require(
            read_environment().world_size == 1,
            "export runs in one process: start it without torchrun",
        )
        export(Path(paths[0]), options, overrides)


def export(run_dir: Path, options: ExportOptions, overrides: Sequence[str]) -> None:
    """Write the model in each format, and its model card, to the folder export in `run_dir`, and
    print their paths.
    """
    with disable_gc():  # imports torch
        from ddp_trainer.tools.export import check_formats, export_files, new_file
        from ddp_trainer.tools.model_card import model_card
        from ddp_trainer.tools.splits import example_images
        from ddp_trainer.tools.trained_model import load_model
    formats = [name.strip() for name in options.format.split(",")]
    check_formats(formats)
    trained = load_model(run_dir, options.checkpoint, overrides)
    images = example_images(trained, options.check_images)
    folder = run_dir / "export"
    inside = options.preprocessing is Place.inside
    differences = export_files(trained, formats, folder, preprocessing_inside=inside, images=images)
    for name, difference in differences.items():
        size = (folder / f"model.{name}").stat().st_size / 1e6
        agrees = (
            f"differs by at most {difference:.1e} on {len(images):,} images"
            if len(images)
            else "not compared"
        )
        print(f"wrote {folder / f'model.{name}'} ({size:,.1f} MB, {agrees})")
    card = model_card(
        trained, differences, num_images=len(images), inside=inside, versions=installed_versions()
    )
    with new_file(folder / "model_card.md") as temporary:
        temporary.write_text(card, encoding="utf-8")
    print(f"wrote {folder / 'model_card.md'}")
