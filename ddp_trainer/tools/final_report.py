"""``report=true``: the scores of the last evaluation and report.html at the end of a launch."""

import logging
from functools import partial

from torch import Tensor

from ddp_trainer.config.observers import ReportConfig
from ddp_trainer.data.dataset import sample_name
from ddp_trainer.data.readers import read_images
from ddp_trainer.scores.files import FOLDER, write_evaluation
from ddp_trainer.scores.scores import Scores
from ddp_trainer.tools.report.page import write_report
from ddp_trainer.training.run import Observer, TrainingRun

logger = logging.getLogger(__name__)


class FinalReport(Observer):
    """Writes the last evaluation's scores to evaluation/last-<split>/, and report.html.

    If the model was not evaluated after the last step, as after a graceful stop, writes only
    report.html. A failure logs a warning.
    """

    def __init__(self, config: ReportConfig) -> None:
        self.config = config

    def on_end(self, run: TrainingRun) -> None:
        rows = None if run.results is None else run.results.gather(run.world)
        if not run.world.is_main:
            return
        path = run.run_dir / "report.html"
        # A bad picture or a full disk must not fail a training that is done and saved.
        try:
            if rows is not None and len(rows):
                write_scores(run, rows)
            write_report([run.run_dir], path)
            logger.info("report %s", path)
        except Exception as error:
            logger.warning("the report was not written: %s", error)


def write_scores(run: TrainingRun, rows: Tensor) -> None:
    """Write the scores of `rows`, the gathered results of the last evaluation."""
    data = run.config.data
    about = {
        "checkpoint": "last",
        "split": data.eval_split,
        "data": data.description,
        "step": run.step,
        "epoch": run.step // run.steps_per_epoch,
    }

    write_evaluation(
        run.run_dir / FOLDER / f"last-{data.eval_split}",
        Scores(rows, run.loaders.datasets.class_names),
        about,
        paths=partial(sample_name, run.loaders.datasets.eval),
        read=partial(read_images, run.loaders.eval.reader),
    )
