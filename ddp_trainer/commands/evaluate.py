"""Score a trained model:

    python -m ddp_trainer evaluate outputs/digits-resnet18-ddp
    torchrun --nproc_per_node=2 -m ddp_trainer evaluate outputs/pets checkpoint=last split=train
    python -m ddp_trainer evaluate outputs/pets data.root=other_pets

Prints loss, top-1 and top-5, and writes them to evaluation/<checkpoint>-<split>/ in the run
directory, or in the folder of the option output, with precision and recall of each class, the
confusion matrix, the calibration and the worst mistakes. Config keys that do not change the trained
model can be set too, for example device, eval_batch_size, data.root and data.num_workers.
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
from ddp_trainer.config.data import SplitName
from ddp_trainer.config.errors import config_class, require
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.runtime import disable_gc


@config_class
class EvaluateOptions(CheckpointOptions):
    """The options of the command."""

    split: SplitName | None = None
    """test, validation or train; null: the split on which the training evaluated."""
    output: str | None = None
    """The folder in which the folder of the scores is written; null: evaluation in the run
    directory.
    """


def main(words: Sequence[str]) -> None:
    """Evaluate a run; exit with 2 for wrong input, with 1 for any other failure."""
    usage = "evaluate RUN_DIR [key=value …]"
    with errors_as_exit_codes():
        options, rest = parse_options(EvaluateOptions, words, usage=usage, description=__doc__)
        paths, overrides = split_paths(rest)
        require(len(paths) == 1, "evaluate takes one run directory: evaluate RUN_DIR")
        with disable_gc():
            from ddp_trainer.tools.scoring import score_run  # imports torch
        lines = score_run(
            Path(paths[0]),
            checkpoint=options.checkpoint,
            split=options.split,
            output=output_folder(options.output, Path(paths[0], "evaluation")),
            overrides=overrides,
            environment=read_environment(),
        )
        for line in lines:
            print(line)
