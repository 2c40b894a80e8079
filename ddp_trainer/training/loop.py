"""The training loop: the same on one process and on many, from the start and from a checkpoint."""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from ddp_trainer.data.loaders import Batch
from ddp_trainer.sync.buffers import averaged_statistics
from ddp_trainer.sync.fingerprint import check_replicas
from ddp_trainer.training.control import Decision, Requests
from ddp_trainer.training.evaluation import compute_metrics, evaluate, mean_over_ranks
from ddp_trainer.training.metrics import SampleDigest
from ddp_trainer.training.phase import Phase
from ddp_trainer.training.prime import prime
from ddp_trainer.training.run import TrainingRun
from ddp_trainer.training.state import RunState
from ddp_trainer.training.summary import Summary, read_summary

logger = logging.getLogger(__name__)

T = TypeVar("T")


def fit(run: TrainingRun) -> Summary:
    """Train until all is done or stopped; return the result. Collective: every rank calls this."""
    is_resumed = run.checkpoints.restore(RunState(run))
    if is_resumed and run.is_done:
        return repeat_summary(run)
    begin(run)
    while not run.is_done:
        begin_epoch(run)
        for batch in train_batches(run):  # the rest of the epoch
            run.train_step(batch.images, batch.labels)
            record_samples(run, batch)
            run.emit("step")
            if control_point(run):  # log, save, stop: decided by all ranks together
                break
        # After a graceful stop within an epoch, the next launch goes on from here.
        is_best = not run.is_interrupted and evaluate_model(run)
        save(run, is_best=is_best)
        if run.is_stopping:
            break
    return summarize(run)


def begin(run: TrainingRun) -> None:
    """Prepare the first step of this launch: check replicas, start observers, prime DDP."""
    run.train_step.sync.begin()
    check_replicas(run.model, run.world, step=run.step)
    run.epoch = run.step // run.steps_per_epoch
    run.emit("start")
    if run.config.compile:
        run.enter(Phase.compilation)
    prime(run.train_step, run.loaders, run.config)


def begin_epoch(run: TrainingRun) -> None:
    """Prepare the next step: that of a new epoch, or of the rest of one after a resume."""
    run.epoch, steps_done = divmod(run.step, run.steps_per_epoch)
    run.results = None
    run.loaders.sampler.set_epoch(run.epoch, steps_done)
    if steps_done == 0:
        run.progress.digest = SampleDigest(run.world.device)
    run.control.begin(run.step)
    run.train_step.begin_training()
    run.emit("epoch")


def train_batches(run: TrainingRun) -> Iterator[Batch]:
    """Yield this rank's batches up to the end of the epoch or of the launch."""
    remaining = run.last_step_of_epoch - run.step
    for batch in in_data_phase(islice(run.loaders.train, remaining), run.enter):
        run.batch = batch
        yield batch


def in_data_phase(batches: Iterable[T], enter: Callable[[Phase], None]) -> Iterator[T]:
    """Yield from `batches`, and call ``enter(phase)`` before and after each wait for a batch."""
    iterator = iter(batches)
    while True:
        enter(Phase.data)
        batch = next(iterator, None)
        if batch is None:
            return
        enter(Phase.between_steps)
        yield batch


def record_samples(run: TrainingRun, batch: Batch) -> None:
    """Add the samples of the last step to the epoch's digest."""
    run.progress.digest.add(batch.ids, step=(run.step - 1) % run.steps_per_epoch)


def control_point(run: TrainingRun) -> bool:
    """Log and save if due; return whether the launch stops here. Collective after some steps."""
    run.enter(Phase.control_point)
    decision = decide(run)
    if decision is None:
        return False

    run.has_requested_save = False
    if decision.has_bad_samples:
        run.bad_samples.gather()
    log(run, decision)
    run.is_stopping = decision.stop
    if decision.requested_stop and not decision.stop:
        run.settle_stop_request()
    if decision.stop or decision.requested_stop:
        run.train_step.sync.synchronize(run.train_step.optimizer)
        return True
    if decision.save and run.step < run.last_step_of_epoch:
        save_within_epoch(run)
    return False


def decide(run: TrainingRun) -> Decision | None:
    """Return what all ranks do after this step; None if it is no control point."""
    step = run.train_step
    is_last = run.step == run.last_step_of_epoch
    if is_last:
        step.sync.synchronize(step.optimizer)
    requests = Requests(
        stop=run.should_stop(),
        requested_stop=run.has_requested_stop,
        save=run.has_requested_save,
        bad_samples=len(run.bad_samples.own),
    )
    return run.control.decide(
        run.step,
        is_last=is_last,
        sums=step.sums,
        nonfinite=step.nonfinite,
        requests=requests,
        rank_values=run.rank_values,
    )


def log(run: TrainingRun, decision: Decision) -> None:
    """Record the values of the steps since the last log point, if this step is one.

    Raises:
        DivergedError: on all ranks, after recording, if a value was not finite and on_nonfinite is
            stop.
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
        run.last_logged = run.values
        run.split_by_observer(decision.by_rank)
        run.emit("log")
    if has_diverged:
        step.nonfinite.fail(run.world, lr=step.lr)


def save_within_epoch(run: TrainingRun) -> None:
    """Save a checkpoint, or postpone this while parameters differ between ranks (local SGD).

    Averaging for a save would make the training depend on how often it is saved.
    """
    if run.train_step.sync.is_synchronized:
        save(run, is_best=False)
    else:
        run.control.postpone_save(run.step)


def save(run: TrainingRun, *, is_best: bool) -> None:
    """Save a checkpoint after checking that all replicas are equal. Collective."""
    run.enter(Phase.save)
    check_replicas(run.model, run.world, step=run.step)
    run.checkpoints.save(RunState(run), is_best=is_best)
    run.control.saved()
    run.emit("save")


def evaluate_model(run: TrainingRun) -> bool:
    """Evaluate and record the result; return whether it is the best so far. Collective."""
    run.enter(Phase.evaluation)
    model = run.train_step.models[-1]
    with averaged_statistics(model, run.world):
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

    # best.pt is chosen at epoch boundaries only, so that it does not depend on the step at which a
    # launch ends.
    is_best = progress.evaluation.top1 > progress.best_top1 and run.step % run.steps_per_epoch == 0
    if is_best:
        progress.best_top1 = progress.evaluation.top1
    digest, count = run.world.all_reduce(progress.digest.vector.clone()).tolist()
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
    run.emit("evaluation")
    run.settle_stop_request()
    return is_best


def in_evaluation_phase(run: TrainingRun) -> Iterator[Batch]:
    """Yield the batches for evaluation; each one counts as progress for the failure monitor."""
    for batch in run.loaders.eval:
        run.enter(Phase.evaluation)
        yield batch


def summarize(run: TrainingRun) -> Summary:
    """Return the result of this launch."""
    values: dict[str, Any] = {}
    for observer in run.events.observers.values():
        values |= observer.summary_values(run)
    progress = run.progress
    return Summary(
        status=run.status,
        stop_reason=progress.stop_reason,
        eval_split=run.config.data.eval_split,
        eval_top1=progress.evaluation.top1,
        eval_loss=progress.evaluation.loss,
        eval_count=progress.evaluation.count,
        best_top1=progress.best_top1,
        epochs=run.step // run.steps_per_epoch,
        steps=run.step,
        seconds=progress.seconds(),
        world_size=run.world.world_size,
        device=run.world.device.type,
        backend=run.world.backend,
        sync=run.config.sync.name,
        **values,
    )


def repeat_summary(run: TrainingRun) -> Summary:
    """Return the last launch's summary; evaluate if it is lost, or that launch was stopped."""
    logger.info("%s: nothing left to train after step %d", run.status, run.step)
    text = read_summary(run.run_dir, run.step) if run.world.is_main else ""
    text = run.world.broadcast_object(text)
    if text:
        return Summary.from_json(text)
    run.epoch = (run.step - 1) // run.steps_per_epoch
    evaluate_model(run)
    return summarize(run)
