"""Check a run directory:

    python -m ddp_trainer verify outputs/digits-resnet18-ddp

Checks that each checkpoint matches its checksum, each finished epoch used exactly the samples that
the seed selects, metrics.jsonl has its steps in order and none twice, TensorBoard has the same
training steps, config.yaml can be read, and summary.json has no later step than the newest
checkpoint. Exits with 1 if a check fails.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_trainer.commands.command_line import errors_as_exit_codes
from ddp_trainer.commands.options import program, wants_help
from ddp_trainer.config.errors import FAILURE, require, require_run_dir
from ddp_trainer.tools.verify import find_damage


def main(words: Sequence[str]) -> None:
    """Print the result of each check; exit with 1 for damage, with 2 for wrong input."""
    if wants_help(words):
        return print(f"usage: {program()} verify RUN_DIR\n\n{(__doc__ or '').strip()}")
    with errors_as_exit_codes():
        require(len(words) == 1, "verify takes one run directory: verify RUN_DIR")
        require_run_dir(Path(words[0]))
        damage = find_damage(Path(words[0]))
        for name, problems in damage.items():
            print("\n  ".join([f"{name:12} {'' if problems else 'ok'}", *problems]))
    sys.exit(FAILURE if any(damage.values()) else 0)
