"""The observer of ``report=true``: it writes scores and report.html at the end of a launch."""

import logging
from functools import partial

from torch import Tensor

from ddp_trainer.config.observers import ReportConfig
from ddp_trainer.config.run_dirs import check_links
from ddp_trainer.data.dataset import sample_name
from ddp_trainer.data.loaders import read_images
from ddp_trainer.scores.files import FOLDER, write_evaluation
from ddp_trainer.scores.scores import Scores
from ddp_trainer.tools.report.page import write_report
from ddp_trainer.training.run import Observer, TrainingRun

logger = logging.getLogger(__name__)


class FinalReport(Observer):
    """Writes the last evaluation's scores to evaluation/last-<split>/, and report.html.

    Writes only report.html if the model was not evaluated after the last step, for example because
    of a graceful stop. If a file cannot be written, logs a warning.
    """

    def __init__(self, config: ReportConfig) -> None:
        self.config = config

    def on_end(self, run: TrainingRun) -> None:
        rows = None if run.results is None else run.results.gather(run.world)
        if not run.world.is_main:
            return
        path = run.run_dir / "report.html"
        # Because training is done and saved, a bad picture or a full disk must not raise here.
        try:
            check_links(run.run_dir)  # again, because somebody may have made one in the meantime
            if rows is not None and len(rows):
                write_scores(run, rows)
            write_report([run.run_dir], path)
            logger.info("report %s", path)
        except Exception as error:
            logger.warning("the report was not written: %s", error)


def write_scores(run: TrainingRun, rows: Tensor) -> None:
    """Write the scores of the last evaluation. rows: a result of `SampleResults.gather`."""
    datasets = run.loaders.datasets
    about = {
        "checkpoint": "last",
        "split": datasets.eval_split,
        "data": run.config.data.description,
        "step": run.step,
        "epoch": run.step // run.steps_per_epoch,
    }

    write_evaluation(
        run.run_dir / FOLDER / f"last-{datasets.eval_split}",
        Scores(rows, datasets.class_names),
        about,
        paths=partial(sample_name, datasets.eval),
        read=partial(read_images, run.loaders.eval.reader),
    )
