"""``report=true``: the scores of the last evaluation and report.html, written at the end of a
launch.
"""

import logging
from functools import partial

from ddp_trainer.data.dataset import Datasets, sample_name
from ddp_trainer.data.readers import read_images
from ddp_trainer.scores.files import FOLDER, write_evaluation
from ddp_trainer.scores.scores import Scores
from ddp_trainer.tools.report.page import write_report
from ddp_trainer.training.trainer import Trainer

logger = logging.getLogger(__name__)


def write_final_report(trainer: Trainer, datasets: Datasets) -> None:
    """If ``report=true``, write the last evaluation's scores to evaluation/last-<split>/, and
    report.html. Collective.

    If the model was not evaluated after the last step, as after a graceful stop, write only
    report.html. A failure logs a warning.
    """
    if not trainer.config.report:
        return
    rows = None if trainer.results is None else trainer.results.gather(trainer.world)
    if not trainer.world.is_main:
        return
    run_dir = trainer.run_dir
    data = trainer.config.data
    loaders = trainer.loaders
    epoch = trainer.step // trainer.steps_per_epoch
    split = data.eval_split
    about = {
        "checkpoint": "last",
        "split": split,
        "data": data.description,
        "step": trainer.step,
        "epoch": epoch,
    }
    try:
        if rows is not None and len(rows):
            write_evaluation(
                run_dir / FOLDER / f"last-{split}",
                Scores(rows, loaders.class_names),
                about,
                paths=partial(sample_name, datasets.eval),
                read=partial(read_images, loaders.eval.reader),
            )
        write_report([run_dir], run_dir / "report.html")
        logger.info("report %s", run_dir / "report.html")
    except (
        Exception
    ) as error:  # a bad picture or a full disk must not fail a training that is done and saved
        logger.warning("the report was not written: %s", error)
