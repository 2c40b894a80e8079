"""Lightning, as in its quick start, without progress bar, logger and checkpoints."""
# pyright: reportMissingImports=false

import os
from typing import Any

import lightning
import torch
from job import Clock, Job, build_dataloader, build_dataset, build_model, build_optimizer, parse_job
from torch import Tensor, nn


class Classifier(lightning.LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = build_model(job.model)
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = self.criterion(self.model(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model)


class Timing(lightning.Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.clock.tick():
            outputs["loss"].item()
            self.clock.close_window()


def main() -> None:
    job = parse_job()
    lightning.seed_everything(0, verbose=False)
    clock = Clock(job)
    trainer = lightning.Trainer(
        accelerator="gpu" if job.device == "cuda" else "cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        precision="bf16-mixed" if job.precision == "bf16" else "32-true",
        max_steps=job.steps,
        log_every_n_steps=job.window,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Timing(clock)],
    )
    trainer.fit(Classifier(job), build_dataloader(job, build_dataset(job)))
    if trainer.is_global_zero:
        clock.report(world_size=trainer.world_size, version=f"lightning {lightning.__version__}")


if __name__ == "__main__":
    main()
