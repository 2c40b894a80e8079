"""Classify image files with the model of a run:

    python -m ddp_trainer predict outputs/pets cat.jpg dog.png
    python -m ddp_trainer predict outputs/pets holiday/ > predictions.jsonl
    find holiday -name '*.jpg' | python -m ddp_trainer predict outputs/pets -

Prints a line of JSON for each file, in the order of the files: path, label, probability, and top,
which is a list of [label, probability]. A path on the command line that does not exist is an error;
any other file that cannot be read as an image is named on stderr and left out. Config keys that do
not change the trained model can be set too, for example device.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_trainer.commands.command_line import errors_as_exit_codes
from ddp_trainer.commands.options import CheckpointOptions, parse_options, split_paths
from ddp_trainer.config.errors import FAILURE, POSITIVE, TransientError, printable, require
from ddp_trainer.distributed.environment import read_environment, usable_cores
from ddp_trainer.runtime import disable_gc, keep_freed_memory


@dataclass(kw_only=True, slots=True)
class PredictOptions(CheckpointOptions):
    """The options of the command."""

    top: int = field(default=5, metadata=POSITIVE)
    """Number of classes to print for each image in top, the most probable first."""
    batch_size: int = field(default=64, metadata=POSITIVE)
    """Images per forward pass of the model."""


def main(words: Sequence[str]) -> None:
    """Classify files; exit with 2 for wrong input, with 1 for any other failure."""
    usage = "predict RUN_DIR FILES|FOLDER|- [key=value …]"
    with errors_as_exit_codes():
        options, rest = parse_options(PredictOptions, words, usage=usage, description=__doc__)
        paths, overrides = split_paths(rest)
        require(
            len(paths) > 1,
            "predict takes a run directory and images: files, folders, or - (paths from stdin)",
        )
        require(
            read_environment().world_size == 1,
            "predict runs in one process: start it without torchrun",
        )
        try:
            predict(Path(paths[0]), paths[1:], options, overrides)
        except BrokenPipeError:  # the reader has ended, as in: predict … | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(FAILURE)


def predict(
    run_dir: Path, words: Sequence[str], options: PredictOptions, overrides: Sequence[str]
) -> None:
    """Print a line of JSON for each image, and bad files on stderr. words: files, folders, or - for
    paths on stdin.
    """
    with disable_gc():  # imports torch
        import torch

        from ddp_trainer.data.loaders import num_readers
        from ddp_trainer.tools.classifier import open_classifier
        from ddp_trainer.tools.prediction import BadFile, find_pictures, predict_files
        from ddp_trainer.tools.trained_model import load_model
    trained = load_model(run_dir, options.checkpoint, overrides)
    paths = find_pictures(words, sys.stdin.buffer)
    threads = trained.config.num_threads
    torch.set_num_threads(threads if isinstance(threads, int) else usable_cores())
    keep_freed_memory()
    readers = num_readers(trained.config.data.num_workers, local_world_size=1)
    num_bad = 0
    began = time.perf_counter()
    for path, result in predict_files(
        open_classifier(trained),
        paths,
        batch_size=options.batch_size,
        num_workers=readers,
        top=options.top,
    ):
        if isinstance(result, BadFile):
            print(f"{printable(path)} cannot be read: {result.reason}", file=sys.stderr)
            num_bad += 1
            continue
        line = {
            "path": path,
            "label": result.label,
            "probability": result.probability,
            "top": result.top,
        }
        write_line(json.dumps(line))
    seconds = time.perf_counter() - began
    bad = f", {num_bad:,} could not be read" if num_bad else ""
    print(
        f"{len(paths) - num_bad:,} images{bad}, {len(paths) / seconds:,.0f} img/s", file=sys.stderr
    )


def write_line(text: str) -> None:
    """Write a line to stdout; TransientError if it cannot be written, for example to a
    full disk.
    """
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise TransientError(f"the output cannot be written: {error.strerror}") from error
