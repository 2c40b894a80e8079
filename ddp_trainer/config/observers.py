"""The group ``observer``: code that watches a training; a run may have several."""

from dataclasses import dataclass

from omegaconf import MISSING

from ddp_trainer.registry import register_observer


@dataclass(kw_only=True, slots=True)
class ObserverConfig:
    name: str = MISSING


@dataclass(kw_only=True, slots=True)
class ReportConfig(ObserverConfig):
    """Writes report.html at the end of a launch, with the scores of the last evaluation."""

    name: str = "report"


register_observer("report", ReportConfig, builder="ddp_trainer.tools.final_report:FinalReport")
