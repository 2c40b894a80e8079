"""The training loop. It is the same for one rank and for many, for a new and for a resumed run."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ddp_trainer.checkpoint.file import first_nonfinite
from ddp_trainer.checkpoint.store import Best
from ddp_trainer.data.loaders import Batch
from ddp_trainer.distributed.world import RoundEndedError
from ddp_trainer.sync.buffers import averaged_statistics
from ddp_trainer.sync.fingerprint import check_replicas
from ddp_trainer.training.control import Decision, Requests
from ddp_trainer.training.evaluation import compute_metrics, evaluate, mean_over_ranks
from ddp_trainer.training.metrics import DIVERGED_FIX, DivergedError, SampleDigest
from ddp_trainer.training.phase import Phase
from ddp_trainer.training.prime import prime
from ddp_trainer.training.run import Stage, TrainingRun
from ddp_trainer.training.state import RunState
from ddp_trainer.training.statistics import refresh_statistics
from ddp_trainer.training.summary import Summary, read_summary

logger = logging.getLogger(__name__)


def fit(run: TrainingRun) -> Summary:
    """Train to the last step or to a stop; return the result. Collective: all ranks call this."""
    is_resumed = run.recovery.restore(RunState(run))
    if is_resumed and run.is_done:
        return repeat_summary(run)
    begin(run)
    if run.step == 0:
        run.checkpoints.rehearse(RunState(run))
    while not run.is_done:
        begin_epoch(run)
        take_steps(run)
        check_updates(run)
        # A graceful stop within an epoch skips the evaluation, because it may take long.
        if run.stage is not Stage.save and not run.is_interrupted:
            run.enter(Phase.evaluation)
            refresh_statistics(run)
            run.progress.is_best = evaluate_model(run)
        run.stage = Stage.save
        save(run, is_best=run.progress.is_best)
        run.stage = Stage.step
        run.progress.is_best = False
        if run.is_stopping:
            break
    return summarize(run)


def take_steps(run: TrainingRun) -> None:
    """Take the steps up to the end of the epoch or of the launch, or up to a stop. Collective."""
    # After the loss of a rank, the training goes on where the furthest rank was.
    if run.stage is Stage.control_point and control_point(run):
        return
    if run.stage is not Stage.step:
        return
    for batch in train_batches(run):
        run.train_step(batch.images, batch.labels)
        run.stage = Stage.control_point
        step_of_epoch = run.train_step.batch_number % run.steps_per_epoch
        run.progress.add_samples(batch.ids, step=step_of_epoch)
        run.emit("step")
        if control_point(run):  # all ranks decide together to log, save and stop
            return


def begin(run: TrainingRun) -> None:
    """Prepare the first step of this launch: check replicas, call observers, prime DDP. Collective.

    Raises:
        DesynchronizedError: on all ranks, if the replicas are not equal.
    """
    run.train_step.sync.begin()
    check_replicas(run.model, run.world, step=run.step)
    run.epoch = run.step // run.steps_per_epoch
    run.emit("start")
    if run.config.compile:
        run.enter(Phase.compilation)
    # After the loss of a rank the model is known to work, and shards do not use DDP.
    if not (run.recovery.is_resumed and run.config.shards):
        prime(run.train_step, run.loaders, run.config)


def begin_epoch(run: TrainingRun) -> None:
    """Prepare for the steps of a new epoch, or for the remaining steps of a resumed epoch."""
    taken = run.step if run.stage is Stage.step else run.step - 1  # the last one is not complete
    run.epoch = taken // run.steps_per_epoch
    steps_done = run.step - run.epoch * run.steps_per_epoch
    run.results = None
    run.loaders.sampler.set_epoch(run.epoch, steps_done)
    if run.recovery.is_on:
        run.progress.all_ids = run.loaders.sampler.global_batches().to(run.world.device)
    if steps_done == 0:
        run.progress.digest = SampleDigest(run.world.device)
        run.progress.skipped_in_epoch = 0.0
    run.control.begin(run.step)
    run.train_step.begin_training()
    run.emit("epoch")


def train_batches(run: TrainingRun) -> Iterator[Batch]:
    """Yield this rank's batches up to the end of the epoch or of the launch."""
    batches = run.train_step.batches(
        run.loaders.train, last_step=run.last_step_of_epoch, next_control=run.control.next_after
    )
    for batch in in_data_phase(batches, run.enter):
        run.recovery.check_group()
        run.batch = batch
        yield batch


def in_data_phase(batches: Iterable[Any], enter: Callable[[Phase], None]) -> Iterator[Any]:
    """Yield each batch; enter `Phase.data` before waiting for it, `Phase.between_steps` after."""
    iterator = iter(batches)
    while True:
        enter(Phase.data)
        batch = next(iterator, None)
        if batch is None:
            return
        enter(Phase.between_steps)
        yield batch


def control_point(run: TrainingRun) -> bool:
    """Log and save if due; return whether training stops now; RoundEndedError if a rank joins.

    Collective: every rank must call this after each step; it communicates at control points only.
    """
    run.enter(Phase.control_point)
    decision = decide(run)
    if decision is None:
        run.stage = Stage.step
        return False

    run.has_requested_save = False
    if decision.has_bad_samples:
        run.bad_samples.gather()
    if decision.requested_stop:
        run.share_stop_request()
    is_stop = decision.stop or decision.requested_stop
    is_end = is_stop or run.step == run.last_step_of_epoch
    run.stage = Stage.evaluation if is_end else Stage.step
    log(run, decision)
    run.is_stopping = decision.stop
    if is_stop:
        run.train_step.sync.synchronize(run.train_step.optimizer)
        return True
    if decision.save and not is_end:
        save_within_epoch(run)
    if decision.join:
        raise RoundEndedError
    return False


def decide(run: TrainingRun) -> Decision | None:
    """Return all ranks' decision after this step; None if it is no control point. Collective."""
    step = run.train_step
    is_last = run.step == run.last_step_of_epoch
    if is_last:
        step.sync.synchronize(step.optimizer)
    requests = Requests(
        stop=run.should_stop(),
        requested_stop=run.requested_stop is not None,
        save=run.has_requested_save,
        join=run.recovery.has_candidates(),
        bad_samples=len(run.bad_samples.own),
    )
    return run.control.decide(
        run.step,
        is_last=is_last,
        sums=step.own_sums,
        nonfinite=step.nonfinite,
        requests=requests,
        rank_values=run.rank_values,
    )


def log(run: TrainingRun, decision: Decision) -> None:
    """Pass the values since the last log point to observers, at a log point or a divergence.

    Raises:
        DivergedError: on all ranks, if a loss or gradient was not finite and on_nonfinite is stop;
            observers have the values then.
    """
    step = run.train_step
    has_diverged = decision.diverged and not step.settings.skips_nonfinite
    if decision.log or has_diverged:
        step.sums.vector.zero_()
        run.values = {
            "epoch": run.epoch,
            "train/loss": decision.loss,
            "train/top1": decision.top1,
            "optim/lr": step.lr,
        }
        if step.can_skip:
            run.values["optim/skipped_updates"] = decision.skipped_updates
            run.progress.skipped_updates += decision.skipped_updates
            run.progress.skipped_in_epoch += decision.skipped_updates
        run.last_logged = run.values  # the same dict, to which observers add values
        run.split_by_observer(decision.by_rank)
        run.emit("log")
    if has_diverged:
        step.nonfinite.fail(run.world, lr=step.lr)


def check_updates(run: TrainingRun) -> None:
    """Check at the end of an epoch that it has updated the model at least once.

    Raises:
        DivergedError: on all ranks, if every update of the epoch was skipped. With fp16, a loss
            scale that is still being lowered is no error.
    """
    is_whole = run.step % run.steps_per_epoch == 0
    has_updates = run.progress.skipped_in_epoch < run.steps_per_epoch
    if is_whole and not has_updates and run.train_step.scaler.get_scale() <= 1:
        raise DivergedError(
            f"all {run.steps_per_epoch} updates of epoch {run.epoch + 1} were skipped, because "
            f"their gradients are not finite: {DIVERGED_FIX}"
        )


def save_within_epoch(run: TrainingRun) -> None:
    """Save a checkpoint, or postpone the save if parameters differ between ranks (local SGD).

    A save does not average the parameters, because then training would depend on when it saves.
    """
    if run.train_step.sync.is_synchronized:
        save(run, is_best=False)
    else:
        run.control.postpone_save(run.step)


def save(run: TrainingRun, *, is_best: bool) -> None:
    """Save a checkpoint after checking that all replicas are equal. Collective.

    Raises:
        DesynchronizedError: on all ranks, if the replicas are not equal.
        DivergedError: a weight is infinite or NaN; a checkpoint with it would be useless.
    """
    run.enter(Phase.save)
    check_replicas(run.model, run.world, step=run.step)
    if name := first_nonfinite(*(model.state_dict() for model in run.train_step.models)):
        raise DivergedError(
            f"weight {name} after step {run.step} is infinite or NaN: {DIVERGED_FIX}"
        )
    run.checkpoints.save(RunState(run), is_best=is_best)
    run.control.saved()
    run.emit("save")


def evaluate_model(run: TrainingRun) -> bool:
    """Evaluate the model; return whether the next checkpoint becomes best.pt. Collective.

    Raises:
        ConfigError: on all ranks, if an image cannot be read and data.on_bad_image is not skip.
        MetricError: on rank 0 only, if a metric fails.
        DivergedError: on all ranks, if the mean loss is infinite or NaN; observers have the result
            then.
    """
    run.enter(Phase.evaluation)
    model = run.train_step.models[-1]
    with averaged_statistics(model, run.train_step.buffer_world), run.train_step.sync.whole(model):
        results = evaluate(
            model,
            in_evaluation_phase(run),
            run.world.device,
            run.train_step.settings.autocast_dtype,
            keeps_probabilities=bool(run.metrics),
        )
    run.bad_samples.gather()
    run.results = results
    progress = run.progress
    progress.evaluation = mean_over_ranks(results, run.world)

    digest, count = progress.total_digest().tolist()
    loss = progress.evaluation.loss
    run.values = {
        "epoch": run.epoch,
        "eval/top1": progress.evaluation.top1,
        "eval/count": progress.evaluation.count,
        "eval/loss": float("nan") if loss is None else loss,
        "samples/count": count,
        "samples/digest": SampleDigest.text(digest),
        **compute_metrics(run.metrics, results, run.world),
    }
    is_best = choose_best(run)
    run.emit("evaluation")  # an observer may request a stop here
    if not math.isfinite(loss or 0.0):
        raise DivergedError(
            f"the model's logits in the evaluation after step {run.step} are infinite or NaN: "
            f"{DIVERGED_FIX}"
        )
    run.share_stop_request()
    return is_best


def choose_best(run: TrainingRun) -> bool:
    """Return whether the evaluation is better than that of the best checkpoint. Collective.

    Only at epoch boundaries, so that best.pt does not depend on the step at which a launch ends.
    """
    name = run.config.select_by
    value = float(run.values[name])
    # The best saved checkpoint counts, because a better one may have been lost on a full disk.
    best = run.checkpoints.shared_best().value
    sign = 1 if run.config.is_higher_better(name) else -1
    is_better = best is None or sign * (value - best) > 0
    if not is_better or run.step % run.steps_per_epoch or not math.isfinite(value):
        return False
    run.progress.best = Best(value=value, top1=run.progress.evaluation.top1)
    return True


def in_evaluation_phase(run: TrainingRun) -> Iterator[Batch]:
    """Yield the evaluation batches; enter the phase for each, so that observers see progress."""
    for batch in run.loaders.eval:
        run.recovery.check_group()
        run.enter(Phase.evaluation)
        yield batch


def summarize(run: TrainingRun) -> Summary:
    """Return the result of this launch. Collective, because observers may communicate."""
    values: dict[str, Any] = {}
    for part in run.events.emit("summary_values", run).values():
        values |= part
    progress = run.progress
    return Summary(
        status=run.status,
        stop_reason=progress.stop_reason,
        eval_split=run.loaders.datasets.eval_split,
        eval_top1=progress.evaluation.top1,
        eval_loss=progress.evaluation.loss,
        eval_count=progress.evaluation.count,
        best_top1=progress.best.top1 or 0.0,
        select_by=run.config.select_by,
        best_value=progress.best.value,
        epochs=run.step // run.steps_per_epoch,
        steps=run.step,
        skipped_updates=round(progress.skipped_updates),
        seconds=progress.seconds(),
        world_size=run.world.world_size,
        device=run.world.device.type,
        backend=run.world.backend,
        sync=run.config.sync.name,
        **values,
    )


def repeat_summary(run: TrainingRun) -> Summary:
    """Return the summary of a run without remaining steps; evaluate if no saved one fits.

    Collective: every rank must call this.
    """
    logger.info("%s: nothing left to train after step %d", run.status, run.step)
    text = read_summary(run.run_dir, run.step) if run.world.is_main else ""
    if text := run.world.broadcast_object(text):
        return Summary.from_json(text)
    run.epoch = (run.step - 1) // run.steps_per_epoch
    evaluate_model(run)
    return summarize(run)
