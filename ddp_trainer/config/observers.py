"""The group ``observer``: objects that get the events of a run, ``observer=[a,b]``."""

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass(kw_only=True, slots=True)
class ObserverConfig:
    name: str = MISSING
