"""The command line: ``torchrun --nproc_per_node=N -m ddp_trainer [key=value …]``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from ddp_trainer.command_line import for_each_job
from ddp_trainer.config import Config, require
from ddp_trainer.environment import read_environment
from ddp_trainer.launchers import register_launchers
from ddp_trainer.memory import without_collection


def main() -> None:
    """Compose the config, run the job or jobs, and exit with 0, 2 for the user's input, or 1."""
    register_launchers()
    with ExitStack() as stack:
        for_each_job(lambda config, run_dir: train(config, run_dir, stack))


def train(config: Config, run_dir: Path, stack: ExitStack) -> float:
    """Run one job and return its best top-1 for a sweeper; the jobs of a sweep share one process group."""
    environment, hydra = read_environment(), HydraConfig.get()
    launcher = hydra.runtime.choices["hydra/launcher"]
    require(launcher == "basic", f"hydra/launcher={launcher} is for sweeps: add --multirun, or leave it out")
    config.check_world_size(environment.world_size)
    with without_collection():
        from ddp_trainer.distributed import connected  # torch takes seconds to import; a bad config should not
        from ddp_trainer.run import run

    if hydra.mode is RunMode.MULTIRUN:
        stack.enter_context(connected(config, environment))
    return run(config, run_dir).best_top1


if __name__ == "__main__":
    main()
