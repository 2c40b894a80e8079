"""The group ``metric``: values that are computed at each evaluation, ``metric=[a,b]``."""

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass(kw_only=True, slots=True)
class MetricConfig:
    name: str = MISSING
