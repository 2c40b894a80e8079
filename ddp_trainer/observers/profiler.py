"""Records some steps with torch.profiler."""

import logging
import tempfile
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, supported_activities

from ddp_trainer.config.observers import ProfilerConfig
from ddp_trainer.files import own_folder, replace_file
from ddp_trainer.training.run import Observer, TrainingRun

logger = logging.getLogger(__name__)


class Profiler(Observer):
    """Writes a trace of some steps, which Perfetto and chrome://tracing can open."""

    def __init__(self, config: ProfilerConfig) -> None:
        self.config = config
        self.profile: Any = None
        """The profiler, while it records."""
        self.first_step = 0
        self.is_begun = False
        """Whether the profiler has recorded, or does."""

    def on_start(self, run: TrainingRun) -> None:
        self.first_step = run.step + self.config.first_step
        self.begin_if_due(run)

    def on_step(self, run: TrainingRun) -> None:
        if self.profile is not None and run.step >= self.first_step + self.config.steps - 1:
            self.write(run)
        self.begin_if_due(run)

    def on_end(self, run: TrainingRun) -> None:
        if self.profile is not None:
            self.write(run)

    def begin_if_due(self, run: TrainingRun) -> None:
        """Begin to record if the next step is the first one."""
        is_chosen = self.config.all_ranks or run.world.is_main
        if is_chosen and not self.is_begun and run.step >= self.first_step - 1:
            self.is_begun = True
            activities = supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA}
            self.profile = profile(activities=activities, record_shapes=True)
            self.profile.start()

    def write(self, run: TrainingRun) -> None:
        """End the recording, and write it to the folder "profile".

        The trace is first written elsewhere, because torch does not say if a disk is full.
        """
        self.profile.stop()
        path = run.run_dir / "profile" / f"rank-{run.world.rank}.json"
        try:
            with own_folder(path.parent) as folder, tempfile.TemporaryDirectory() as temporary:
                trace = Path(temporary, "trace.json")
                self.profile.export_chrome_trace(str(trace))
                with replace_file(folder / path.name) as file:
                    file.write(trace.read_bytes())
            logger.info("the trace of steps up to %d is %s: open it in Perfetto", run.step, path)
        except OSError as error:
            logger.warning("%s was not written: %s", path, error)
        self.profile = None
