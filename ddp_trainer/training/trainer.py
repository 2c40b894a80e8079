"""The training loop: the same on one process and on many, from the start and from a checkpoint."""

import json
import logging
import time
from collections.abc import Iterator
from statistics import median_high

import torch

from ddp_trainer.checkpoint.file import State
from ddp_trainer.checkpoint.run_dir import check_changes
from ddp_trainer.checkpoint.store import CheckpointStore
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.config.schema import Config, OnNonfinite
from ddp_trainer.data.loaders import Batch, Loaders
from ddp_trainer.models.state import load_state, tensors_of
from ddp_trainer.observers.console import progress_bar
from ddp_trainer.observers.failures.monitor import FailureMonitor
from ddp_trainer.observers.log_window import LogWindow
from ddp_trainer.observers.loggers.base import LoggerGroup, Value
from ddp_trainer.observers.pictures import log_pictures, log_scores
from ddp_trainer.sync.buffers import averaged_statistics, restore_buffers
from ddp_trainer.training.bad_samples import BadSamples
from ddp_trainer.training.control import ControlPoint
from ddp_trainer.training.evaluation import evaluate, mean_over_ranks
from ddp_trainer.training.metrics import Progress, SampleDigest, check_replicas
from ddp_trainer.training.phase import Phase
from ddp_trainer.training.results import SampleResults
from ddp_trainer.training.step import TrainStep
from ddp_trainer.training.summary import Status, Summary, read_summary

logger = logging.getLogger(__name__)


class Trainer:
    """Trains the model of `step` on the batches of `loaders`. Every rank builds a trainer and calls
    `fit`.
    """

    def __init__(
        self,
        config: Config,
        *,
        step: TrainStep,
        window: LogWindow,
        loaders: Loaders,
        checkpoints: CheckpointStore,
        loggers: LoggerGroup,
        control: ControlPoint,
        monitor: FailureMonitor,
    ) -> None:
        self.config = config
        self.train_step = step
        self.window = window
        self.loaders = loaders
        self.checkpoints = checkpoints
        self.loggers = loggers
        self.control = control
        self.monitor = monitor
        self.world = step.world
        self.model = step.model
        self.run_dir = checkpoints.folder.parent
        self.progress = Progress(step.world, step.sums)
        self.bad_samples = BadSamples(
            loaders.bad_samples,
            step.world,
            on_bad_image=config.data.on_bad_image,
            run_dir=self.run_dir,
        )
        self.steps_per_epoch = loaders.sampler.steps_per_epoch
        self.total_steps = config.epochs * self.steps_per_epoch
        self.last_step = (
            self.total_steps
            if config.max_steps is None
            else min(self.total_steps, config.max_steps)
        )
        """The optimizer step at which this launch ends."""
        self.epoch_seconds: list[float] = []
        self.results: SampleResults | None = None
        """The results of this rank's samples if the model was evaluated after the last step, else
        None.
        """

    def fit(self) -> Summary:
        """Train, evaluate and save until done or stopped; return the result. Collective: every rank
        must call this.
        """
        resumed = self.checkpoints.restore(self)
        if self.step >= self.last_step and resumed:
            return self.repeat_summary()
        self.begin()
        while self.step < self.last_step:
            epoch = self.step // self.steps_per_epoch
            is_whole = self.train_epoch(epoch)
            is_best = is_whole and self.evaluate(epoch)
            self.save(is_best=is_best)
            if not is_whole:
                break
        return self.summary()

    def begin(self) -> None:
        """Prepare the first step of this launch: compare replicas, start the loggers, warm up DDP.
        Collective.
        """
        self.window.start()
        self.train_step.sync.begin()
        check_replicas(self.model, self.world, step=self.step)
        self.loggers.start(self.step)
        epoch = self.step // self.steps_per_epoch
        self.loggers.scalars(
            {"epoch": epoch, "launch/world_size": self.world.world_size}, self.step
        )
        self.loggers.text(
            "config", f"```json\n{json.dumps(to_builtins(self.config), indent=2)}\n```", self.step
        )
        self.prime()

    def prime(self) -> None:
        """Warm up DDP and the compiler with black images; ConfigError for wrong logits or BatchNorm
        of one image.
        """
        config = self.config
        device = self.world.device
        image_shape = self.loaders.image_shape
        if config.compile:
            self.monitor.on_phase(self, Phase.compilation)
        passes = config.gradient_accumulation_steps
        # images per pass on any rank
        smallest = config.global_batch_size // self.world.world_size // passes
        is_exact = config.compile or device.type == "cuda"  # because kernels are chosen by shape
        share = self.loaders.sampler.local_batch_size
        count = share // passes if is_exact else min(2, smallest)
        counts = [count, count + 1] if config.compile and share % passes else [count]
        black = [
            torch.zeros(number, *image_shape, dtype=torch.uint8, device=device) for number in counts
        ]
        try:
            shape = list(self.train_step.prime_ddp(*map(self.loaders.train.normalize, black)))
        except ValueError as error:  # BatchNorm has no variance of one value
            if smallest > 1:
                raise
            raise ConfigError(
                f"global_batch_size={config.global_batch_size} leaves a rank only one image per"
                f" pass, and model={config.model.name} cannot train on a single image ({error}):"
                " raise global_batch_size, or start fewer ranks"
            ) from error
        expected = [count, len(self.loaders.class_names)]
        require(
            shape == expected,
            f"model={config.model.name} must return logits [images, classes], which is {expected}"
            f" here, and returns {shape}",
        )

    @property
    def step(self) -> int:
        """The number of optimizer steps taken, over all launches."""
        return self.train_step.count

    @property
    def status(self) -> Status:
        """The status of this launch, if it ends now."""
        if self.step < self.last_step:
            return Status.stopped
        return Status.finished if self.step >= self.total_steps else Status.max_steps

    def train_epoch(self, epoch: int) -> bool:
        """Train to the end of the epoch, or to max_steps if that is earlier. Return False if
        stopped before.
        """
        began = time.perf_counter()
        start = self.step % self.steps_per_epoch
        self.results = None
        self.loaders.sampler.set_epoch(epoch, start)
        if start == 0:
            self.progress.digest = SampleDigest(self.world.device)
        end = min(self.last_step, (epoch + 1) * self.steps_per_epoch)
        self.control.begin(self.step)
        self.window.timer.restart()
        self.train_step.begin_training()
        text = f"epoch {epoch + 1}/{self.config.epochs}"
        with progress_bar(
            text, step=start, steps=self.steps_per_epoch, enabled=self.world.is_main
        ) as advance:
            for batch in self.window.timer.timed(self.loaders.train):
                if self.step == 0:
                    log_pictures(self.loggers, self.loaders, batch.images, run_dir=self.run_dir)
                self.train_step(batch.images, batch.labels)
                self.progress.digest.add(batch.ids, step=(self.step - 1) % self.steps_per_epoch)
                self.monitor.on_step(self)
                self.monitor.on_phase(self, Phase.data)
                advance()
                if self.control_point(epoch, is_last=self.step == end) or self.step == end:
                    break
        if start == 0 and self.step == (epoch + 1) * self.steps_per_epoch:
            self.epoch_seconds.append(time.perf_counter() - began)
        return self.step == end

    def control_point(self, epoch: int, *, is_last: bool) -> bool:
        """Log and save if due. is_last: the epoch or launch ends after this step. Return whether
        all ranks stop.
        """
        step = self.train_step
        sync = self.train_step.sync
        self.window.timer.enter("control point")
        if is_last:
            sync.synchronize(step.optimizer)
        decision = self.control.decide(
            self.step,
            is_last=is_last,
            sums=step.sums,
            nonfinite=step.nonfinite,
            num_bad_samples=len(self.bad_samples.own),
            own_report=self.window.reports.own,
        )
        if decision is None:
            return False
        if decision.has_bad_samples:
            self.bad_samples.gather()
        has_diverged = decision.diverged and self.config.on_nonfinite is OnNonfinite.stop
        if decision.log or has_diverged:
            self.loggers.scalars(self.window.close(epoch, decision), self.step)
        if has_diverged:
            step.nonfinite.fail(self.world, lr=step.lr)
        if decision.stop:
            sync.synchronize(step.optimizer)
        elif decision.save and not is_last:
            # Averaging for a save would make the training depend on how often it is saved.
            self.save() if sync.is_synchronized else self.control.postpone_save(self.step)
        return decision.stop

    def evaluate(self, epoch: int) -> bool:
        """Evaluate and record the result. Return whether the accuracy is the best so far.
        Collective.
        """
        self.monitor.on_phase(self, Phase.evaluation)
        model = self.train_step.models[-1]
        dtype = self.train_step.settings.autocast_dtype
        with averaged_statistics(model, self.world):
            self.results = evaluate(model, self.evaluation_batches(), self.world.device, dtype)
        self.bad_samples.gather()
        result = mean_over_ranks(self.results, self.world)
        digest, count = self.world.all_reduce(self.progress.digest.vector.clone()).tolist()
        self.progress.evaluation = result
        # best.pt is chosen at epoch boundaries only, so that it does not depend on the step at
        # which a launch ends.
        is_best = self.step % self.steps_per_epoch == 0 and result.top1 > self.progress.best_top1
        if is_best:
            self.progress.best_top1 = result.top1
        values: dict[str, Value] = {
            "epoch": epoch,
            "eval/top1": result.top1,
            "eval/count": result.count,
        }
        values |= {"eval/loss": float("nan") if result.loss is None else result.loss}
        values |= {"samples/count": count, "samples/digest": SampleDigest.text(digest)}
        self.loggers.scalars(values, self.step)
        place = f"epoch {epoch + 1}/{self.config.epochs}"
        split = self.config.data.eval_split
        logger.info("%s · %s · %s %.4f", place, self.window.line, split, result.top1)
        is_power_of_two = (epoch + 1) & epoch == 0
        if self.config.logger and (is_power_of_two or self.step >= self.last_step):
            log_scores(self.loggers, self.loaders, self.results.gather(self.world), self.step)
        return is_best

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yield the batches of this rank; each batch counts as progress for the failure monitor."""
        for batch in self.loaders.eval:
            self.monitor.on_phase(self, Phase.evaluation)
            yield batch

    def save(self, *, is_best: bool = False) -> None:
        """Save a checkpoint after checking that all replicas are equal. Collective: every rank must
        call this.
        """
        self.monitor.on_phase(self, Phase.save)
        check_replicas(self.model, self.world, step=self.step)
        self.checkpoints.save(self, is_best=is_best)
        self.control.saved()

    def state_dict(self) -> State:
        """Return the state from which training resumes; parameters and optimizer state are not
        copied. Collective.
        """
        with averaged_statistics(self.train_step.models, self.world) as own:
            model, *averages = (tensors_of(model) for model in self.train_step.models)
        return {
            "model": model,
            "ema": averages[0] if averages else None,
            **self.train_step.state_dict(),
            "epoch": self.step // self.steps_per_epoch,
            "samples_seen": self.step * self.config.global_batch_size,
            "config": to_builtins(self.config),
            "best_top1": self.progress.best_top1,
            "class_names": self.loaders.class_names,
            "preprocessing": self.loaders.preprocessing,
            "data_fingerprint": self.loaders.fingerprint,
            "train_samples": self.loaders.sampler.length,
            "statistics_by_rank": self.world.all_gather(own),
            "progress": self.progress.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Restore `state`, saved by any number of ranks; ConfigError if it belongs to another
        config or other data.
        """
        check_changes(state["config"], to_builtins(self.config), run_dir=self.run_dir)
        require(
            state["data_fingerprint"] == self.loaders.fingerprint,
            f"{self.run_dir} was trained on other images than data={self.config.data.name} has"
            " here: restore the former images, choose name=… for a new run, or resume=never to"
            " start from step 0",
        )
        for model, saved in zip(
            self.train_step.models, (state["model"], state.get("ema")), strict=False
        ):
            load_state(model, saved or {})
        self.train_step.load_state_dict(state)
        if len(state["statistics_by_rank"]) == self.world.world_size:
            restore_buffers(self.train_step.models, state["statistics_by_rank"][self.world.rank])
        self.progress.load_state_dict(state["progress"], best_top1=state["best_top1"])

    def summary(self) -> Summary:
        """Return the result of this launch."""
        rate = self.window.timer.median_rate()
        seconds_per_epoch = (
            self.steps_per_epoch * self.config.global_batch_size / rate if rate else None
        )
        return Summary(
            status=self.status,
            eval_split=self.config.data.eval_split,
            eval_top1=self.progress.evaluation.top1,
            eval_loss=self.progress.evaluation.loss,
            eval_count=self.progress.evaluation.count,
            best_top1=self.progress.best_top1,
            epochs=self.step // self.steps_per_epoch,
            steps=self.step,
            seconds=self.progress.seconds(),
            images_per_second=rate,
            **self.window.utilizations(rate),
            seconds_per_epoch=(
                median_high(self.epoch_seconds) if self.epoch_seconds else seconds_per_epoch
            ),
            world_size=self.world.world_size,
            device=self.world.device.type,
            backend=self.world.backend,
            sync=self.config.sync.name,
            rank_own_ms=self.window.reports.mean_own_ms(),
        )

    def repeat_summary(self) -> Summary:
        """Return the last launch's summary; evaluate if it is lost, or if that launch was stopped.
        Collective.
        """
        logger.info("%s: nothing left to train after step %d", self.status, self.step)
        text = self.world.broadcast_object(
            read_summary(self.run_dir, self.step) if self.world.is_main else ""
        )
        if text:
            return Summary.from_json(text)
        self.evaluate((self.step - 1) // self.steps_per_epoch)
        return self.summary()
