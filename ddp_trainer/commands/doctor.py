"""Examine this machine, or all machines of a job, and print whether they can train:

    python -m ddp_trainer doctor                                    # this host
    torchrun --nproc_per_node=2 -m ddp_trainer doctor               # all nodes of a job
    launch/multinode.sh doctor                                      # the same
    python -m ddp_trainer doctor RUN_DIR                            # stacks of a running training

Accepts the keys of a run (device, backend, output_dir …). Exits with 0 if training can start here,
else with 2 and prints the reason. With RUN_DIR, prints the current stacks of the ranks that train
there.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_trainer.commands.command_line import errors_as_exit_codes, run_command
from ddp_trainer.commands.options import wants_help
from ddp_trainer.config.errors import POSITIVE, USER_ERROR, require
from ddp_trainer.config.schema import Config
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.distributed.process_group import process_group
from ddp_trainer.observers.failures.stacks import stacks_of
from ddp_trainer.tools.doctor import Finding, examine, plural


@dataclass(kw_only=True, slots=True)
class DoctorOptions:
    """The options of the command."""

    size_mb: int = field(default=25, metadata=POSITIVE)
    """Size of the measured all-reduce, in units of 2^20 bytes, such as DDP's buckets of 25."""


def main(words: Sequence[str]) -> None:
    """Examine the machines, or print the stacks of a run; exit with 2 if training cannot start."""
    # sweep/lr=0.1 is a directory
    if words and not wants_help(words) and not re.match("-|(hydra/)?[^/]+=", words[0]):
        with errors_as_exit_codes():
            require(
                len(words) == 1,
                "doctor takes one run directory, or keys: doctor RUN_DIR, or doctor key=value …",
            )
            print(stacks_of(Path(words[0])), end="")
        return
    run_command(doctor, DoctorOptions, words, description=__doc__)


def doctor(config: Config, run_dir: Path, options: DoctorOptions) -> None:
    """Examine the hosts, and exit with 2 on all ranks if one finding is an error. Collective."""
    with process_group(read_environment(), **config.process_group) as world:
        findings = examine(world, run_dir=run_dir, size_mb=options.size_mb)
    can_train = not any(finding.is_error for finding in findings)
    if world.is_main:
        print_findings(findings)
        if can_train:
            print(f"ready: {plural(world.world_size, 'rank')} can train here")
    if not can_train:
        sys.exit(USER_ERROR)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print the table of findings, then the warnings, then the errors."""
    for finding in findings:
        print(f"{finding.mark}  {finding.name:21}  {finding.value}")
    advised = [finding for finding in findings if finding.advice]
    for finding in sorted(advised, key=lambda finding: finding.is_error):
        print(f"{'error' if finding.is_error else 'warning'}: {finding.advice}")
