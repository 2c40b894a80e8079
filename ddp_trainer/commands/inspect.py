"""Examine a data set before training:

    python -m ddp_trainer inspect data=imagefolder data.root=pictures output=inspect.html
    python -m ddp_trainer inspect data=manifest data.file=labels.csv strict=true
    python -m ddp_trainer inspect data=imagefolder data.root=pictures runs=[outputs/folds/*]

Prints the number of images of each split and class, damaged files, copies and near copies (encoded
again, scaled, mirrored, or cropped a little), groups in several splits, and class names that differ
only by case or accents. With runs of a cross-validation (data.fold), also labels that are probably
wrong. The page has the pictures, and a JSON file beside it has all findings.
"""

import glob
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_trainer.commands.command_line import errors_as_exit_codes, for_each_job
from ddp_trainer.commands.options import output_path, parse_options
from ddp_trainer.config.errors import FAILURE, config_class, require, setting
from ddp_trainer.config.images import DataConfig
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.output import OTHER_OUTPUT, output_file
from ddp_trainer.runtime import disable_gc

JSON_BEGIN = b'{\n "splits": {'
"""The first bytes of the JSON file of an inspection."""


@config_class
class InspectOptions:
    """The options of the command."""

    output: str | None = None
    """The page (.html) to write; null: none."""
    strict: bool = False
    """Exit with 1 if there is any finding."""
    runs: list[str] = setting([])
    """Run directories, such as outputs/folds/*, whose predictions show labels that are wrong."""

    def __post_init__(self) -> None:
        require(
            self.output is None or self.output.endswith(".html"),
            f"output={self.output} must end in .html",
        )


def main(words: Sequence[str]) -> None:
    """Run the command; exit with 2 for wrong input, with 1 for any other failure."""
    usage = "inspect [option=value …] [key=value …]"
    with errors_as_exit_codes():
        options, overrides = parse_options(InspectOptions, words, usage=usage, description=__doc__)
    for_each_job(lambda config, _: inspect(config.data, options), overrides)


def inspect(config: DataConfig, options: InspectOptions) -> None:
    """Write the page, and print what is found in the data set."""
    environment = read_environment()
    require(environment.world_size == 1, "inspect runs in one process: start it without torchrun")
    page = None if options.output is None else output_path(options.output)
    run_dirs = [Path(path) for word in options.runs for path in sorted(glob.glob(word)) or [word]]
    with disable_gc():  # imports torch
        from ddp_trainer.data.build import build_datasets, num_readers
        from ddp_trainer.tools.inspect.findings import find
        from ddp_trainer.tools.inspect.labels import suspected_labels
        from ddp_trainer.tools.inspect.page import build_page
        from ddp_trainer.tools.inspect.scan import scan
    datasets = build_datasets(config)
    names = list(datasets.class_names)
    splits = {"train": datasets.train, datasets.eval_split: datasets.eval}
    threads = num_readers(config.num_workers, local_world_size=1)
    suspects = None
    if run_dirs:
        suspects = suspected_labels(run_dirs, names, [*splits.values()], environment)
    findings = find(scan(splits, names, num_threads=threads), suspects)
    lines = list(findings.lines())
    if page is not None:
        with output_file(page.with_suffix(".json"), fix=OTHER_OUTPUT, begin=JSON_BEGIN) as file:
            file.write(json.dumps(findings.to_json(), indent=1).encode())
        with output_file(page, fix=OTHER_OUTPUT, begin=b"<!doctype html>") as file:
            file.write(build_page(findings, config.description).encode(errors="replace"))
        lines.append(f"wrote {page} and {page.with_suffix('.json')}")
    print(*lines, sep="\n")  # at the end, because the reader of the output may have ended
    if options.strict and any(findings.counts().values()):
        sys.exit(FAILURE)
