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
from collections.abc import Sequence
from pathlib import Path

from ddp_trainer.commands.command_line import errors_as_exit_codes, run_command
from ddp_trainer.commands.options import wants_help
from ddp_trainer.config.errors import POSITIVE, config_class, plural, require, setting
from ddp_trainer.config.schema import Config
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.distributed.process_group import process_group
from ddp_trainer.observers.failures.stacks import stacks_of
from ddp_trainer.tools.doctor import examine


@config_class
class DoctorOptions:
    """The options of the command."""

    size_mib: int = setting(25, POSITIVE)
    """Size of the measured all-reduce in MiB; 25 MiB is the size of a DDP bucket."""


def main(words: Sequence[str]) -> None:
    """Examine the machines, or print the stacks of a run; exit with 2 if training cannot start."""
    # A word such as sweep/lr=0.1 is a directory, and not a key.
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
    """Examine the hosts; print the findings on rank 0. Collective: every rank must call this.

    Raises:
        ConfigError: on all ranks, if training cannot start.
    """
    with process_group(read_environment(), **config.process_group) as world:
        findings = examine(world, run_dir=run_dir, size_mib=options.size_mib)
    if world.is_main:
        for finding in findings:
            print(f"{'!' if finding.advice else '✓'}  {finding.name:21}  {finding.value}")
        for finding in findings:
            if finding.advice:
                print(f"warning: {finding.advice}")
        print(f"ready: {plural(world.world_size, 'rank')} can train here")
