"""Write the model of a run to files that other programs read:

    python -m ddp_trainer export outputs/pets
    python -m ddp_trainer export outputs/pets format=onnx checkpoint=last

Writes export/model.safetensors, export/model.pt2 (torch.export) and export/model.onnx in the run
directory, or only those that the option format lists, and export/model_card.md, which explains how
to use them. The option output chooses another folder than export/. The pt2 and onnx models
normalize the uint8 images themselves. A file is kept only if its probabilities differ by at most
1e-5 from those of the checkpoint. They are compared on 1,000 images (the option check_images) of
the split on which the training evaluated, or on all images of a smaller split. Config keys that do
not change the trained model can be set too, for example data.root.
"""

from collections.abc import Sequence
from pathlib import Path

from ddp_trainer.commands.command_line import errors_as_exit_codes
from ddp_trainer.commands.options import (
    CheckpointOptions,
    output_folder,
    parse_options,
    split_paths,
)
from ddp_trainer.config.errors import NOT_NEGATIVE, config_class, require, setting
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.runtime import disable_gc


@config_class
class ExportOptions(CheckpointOptions):
    """The options of the command."""

    output: str | None = None
    """The folder of the files; null: export in the run directory."""
    format: list[str] = setting(["safetensors", "pt2", "onnx"])
    """The formats of the files to write."""
    check_images: int = setting(1000, NOT_NEGATIVE)
    """Number of images on which the files are compared with the checkpoint; 0: there is no
    comparison, and the data set is not needed.
    """


def main(words: Sequence[str]) -> None:
    """Export a model; exit with 2 for wrong input, with 1 for any other failure."""
    usage = "export RUN_DIR [key=value …]"
    with errors_as_exit_codes():
        options, rest = parse_options(ExportOptions, words, usage=usage, description=__doc__)
        paths, overrides = split_paths(rest)
        require(len(paths) == 1, "export takes one run directory: export RUN_DIR")
        require(
            read_environment().world_size == 1,
            "export runs in one process: start it without torchrun",
        )
        with disable_gc():  # imports torch
            from ddp_trainer.tools.export import export_model
            from ddp_trainer.tools.trained_model import load_model
        trained = load_model(Path(paths[0]), options.checkpoint, overrides)
        folder = output_folder(options.output, trained.run_dir / "export")
        lines = export_model(trained, folder, options.format, num_images=options.check_images)
        print("\n".join(lines))
