"""The group ``metric``: further scores of an evaluation; a run may have several."""

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass(kw_only=True, slots=True)
class MetricConfig:
    name: str = MISSING
