"""Check a run directory, or compare two:

    python -m ddp_trainer verify outputs/digits-resnet18-ddp
    python -m ddp_trainer verify outputs/first outputs/second

Checks that each checkpoint matches its checksum, that each finished epoch used exactly the samples
that the seed selects, that metrics.jsonl has its steps in order and no training step twice, that
TensorBoard has the same training steps, that config.yaml, summary.json and the lines of
metrics.jsonl can be read, and that summary.json has no later step than the newest checkpoint. A
check also prints ok if the run did not write the checked files, for example metrics.jsonl without
logger=jsonl. Exits with 1 if a check fails.

Of two run directories, the checkpoints of equal steps and the records of equal steps are compared
bit by bit. The first difference of each kind is printed. Exits with 1 if there is one.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_trainer.commands.command_line import errors_as_exit_codes
from ddp_trainer.commands.options import program, wants_help
from ddp_trainer.config.errors import FAILURE, require
from ddp_trainer.config.run_dirs import check_links, require_run_dir
from ddp_trainer.tools.compare_runs import compare_runs
from ddp_trainer.tools.verify import find_damage


def main(words: Sequence[str]) -> None:
    """Print the result of each check; exit with 1 for damage, with 2 for wrong input."""
    if wants_help(words):
        usage = f"usage: {program()} verify RUN_DIR [RUN_DIR]"
        return print(f"{usage}\n\n{(__doc__ or '').strip()}")
    with errors_as_exit_codes():
        require(len(words) in (1, 2), "verify takes one or two run directories: verify RUN_DIR")
        run_dirs = [Path(word) for word in words]
        for run_dir in run_dirs:
            require_run_dir(run_dir)
            check_links(run_dir)
        damage = find_damage(run_dirs[0]) if len(run_dirs) == 1 else compare_runs(*run_dirs)
        for name, problems in damage.items():
            print("\n  ".join([f"{name:12} {'' if problems else 'ok'}", *problems]))
    sys.exit(FAILURE if any(damage.values()) else 0)
