"""The command line: ``torchrun --nproc_per_node=N -m ddp_trainer [key=value …]``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from ddp_trainer.command_line import for_each_job
from ddp_trainer.config import Config
from ddp_trainer.environment import read_environment


def main() -> None:
    """Compose the config, run the job or jobs, and exit with 0, 2 for the user's input, or 1."""
    with ExitStack() as stack:
        for_each_job(lambda config, run_dir: train(config, run_dir, stack))


def train(config: Config, run_dir: Path, stack: ExitStack) -> float:
    """Run one job and return its best top-1 for a sweeper; the jobs of a sweep share one process group."""
    environment = read_environment()
    config.check_world_size(environment.world_size)
    from ddp_trainer.distributed import connected  # torch takes seconds to import; a bad config should not
    from ddp_trainer.run import run

    if HydraConfig.get().mode is RunMode.MULTIRUN:
        stack.enter_context(connected(config, environment))
    return run(config, run_dir).best_top1


if __name__ == "__main__":
    main()
