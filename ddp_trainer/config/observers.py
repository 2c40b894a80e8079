"""The group ``observer``: code that observes a training run; a run may have several observers."""

from omegaconf import MISSING

from ddp_trainer.config.errors import NOT_NEGATIVE, POSITIVE, config_class, setting
from ddp_trainer.registry import register_observer


@config_class
class ObserverConfig:
    name: str = MISSING


@config_class
class ReportConfig(ObserverConfig):
    """Writes report.html at the end of a launch, with the scores of the last evaluation."""

    name: str = "report"


@config_class
class EarlyStoppingConfig(ObserverConfig):
    """Ends the training when a value of the evaluation no longer improves."""

    name: str = "early_stopping"
    monitor: str | None = None
    """The value, for example eval/loss, or eval/macro_f1 with metric=[macro_f1]; null: select_by.
    """
    patience: int = setting(10, POSITIVE)
    """Number of epochs in a row without an improvement after which the training ends."""
    min_delta: float = setting(0.0, NOT_NEGATIVE)
    """A change counts as an improvement if it is larger than this."""


@config_class
class ProfilerConfig(ObserverConfig):
    """Records some steps with torch.profiler, in RUN_DIR/profile/rank-R.json."""

    name: str = "profiler"
    first_step: int = setting(20, POSITIVE)
    """The first step of this launch to record, from 1."""
    steps: int = setting(5, POSITIVE)
    """Number of steps to record."""
    all_ranks: bool = False
    """Record all ranks; false: rank 0 only."""


register_observer(
    "early_stopping",
    EarlyStoppingConfig,
    builder="ddp_trainer.observers.early_stopping:EarlyStopping",
)
register_observer("profiler", ProfilerConfig, builder="ddp_trainer.observers.profiler:Profiler")
register_observer("report", ReportConfig, builder="ddp_trainer.tools.final_report:FinalReport")
