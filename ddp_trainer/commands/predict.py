"""Classify image files with the model of a run:

    python -m ddp_trainer predict outputs/pets cat.jpg dog.png
    python -m ddp_trainer predict outputs/pets holiday/ > predictions.jsonl
    find holiday -name '*.jpg' | python -m ddp_trainer predict outputs/pets -

Prints a line of JSON for each file, in the order of the files: path, label, probability, and top,
which is a list of [label, probability]. A path on the command line that does not exist is an error.
Any other file that cannot be read as an image is left out, and stderr has its path and the reason;
the exit code is 2 if no file can be read.
Config keys that do not change the trained model can be set too, for example device.
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_trainer.commands.command_line import errors_as_exit_codes
from ddp_trainer.commands.options import CheckpointOptions, parse_options, split_paths
from ddp_trainer.config.errors import (
    POSITIVE,
    config_class,
    printable,
    require,
    setting,
)
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.runtime import disable_gc

if TYPE_CHECKING:
    from ddp_trainer.tools.classifier import Prediction


@config_class
class PredictOptions(CheckpointOptions):
    """The options of the command."""

    top: int = setting(5, POSITIVE)
    """Number of classes in the list top of each image, the most probable class first."""
    batch_size: int = setting(64, POSITIVE)
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
        with disable_gc():  # imports torch
            from ddp_trainer.tools.classifier import Classifier
            from ddp_trainer.tools.prediction import find_pictures, predict_files
            from ddp_trainer.tools.trained_model import load_model
        require(
            "-" not in paths[1:] or sys.stdin is not None,
            "- reads paths from stdin, and stdin is closed: pipe them in, or give files or folders",
        )
        trained = load_model(Path(paths[0]), options.checkpoint, overrides)
        files = find_pictures(paths[1:], sys.stdin.buffer if sys.stdin else ())
        results = predict_files(
            trained, Classifier(trained), files, batch_size=options.batch_size, top=options.top
        )
        print_results(results)


def print_results(results: Iterator[tuple[str, "Prediction | str"]]) -> None:
    """Print a line of JSON for each prediction; print unreadable files and the speed on stderr."""
    num_good = 0
    num_bad = 0
    began = time.perf_counter()
    for path, result in results:
        if isinstance(result, str):
            print(f"{printable(path)} cannot be read: {result}", file=sys.stderr)
            num_bad += 1
        else:
            line = json.dumps({"path": path, **result._asdict()}, ensure_ascii=False)
            # JSON allows these control characters, and a terminal executes them
            line = re.sub(r"[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", line)
            print(line, flush=True)
            num_good += 1
    rate = (num_good + num_bad) / (time.perf_counter() - began)
    bad = f", {num_bad:,} could not be read" if num_bad else ""
    print(f"{num_good:,} images{bad}, {rate:,.0f} img/s", file=sys.stderr)
    require(num_good > 0 or num_bad == 0, "no image could be read: the reasons are above")
