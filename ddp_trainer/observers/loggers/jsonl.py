"""``logger=jsonl``: metrics.jsonl, one JSON object a line with ``time``, ``step``, ``epoch`` and
the tags as keys.
"""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

from ddp_trainer.config.loggers import JsonlConfig
from ddp_trainer.files import read_records, replace_text
from ddp_trainer.observers.loggers.base import Logger, Value

MAX_PENDING = 10_000
"""How many records stay in memory while the disk is full; they are written when there is space
again.
"""


class JsonlLogger(Logger):
    """Appends to metrics.jsonl. Numbers that JSON does not have, such as NaN, become text."""

    def __init__(self, config: JsonlConfig, run_dir: Path) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.pending: list[str] = []

    def start(self, step: int) -> None:
        if self.path.exists():
            kept = [line for line, record in read_records(self.path) if record["step"] <= step]
            replace_text(self.path, "".join(f"{line}\n" for line in kept))

    def scalars(self, values: Mapping[str, Value], step: int) -> None:
        plain = {
            tag: v if isinstance(v, str) or math.isfinite(v) else str(v)
            for tag, v in values.items()
        }
        record = {"time": time.time(), "step": step, **plain}
        self.pending = [*self.pending[-MAX_PENDING:], json.dumps(record) + "\n"]
        append("".join(self.pending), self.path)
        self.pending.clear()


def append(text: str, path: Path) -> None:
    """Append `text` to `path`, all of it or nothing; OSError if it cannot be written."""
    data = text.encode()
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        if file.write(data) < len(data):
            file.truncate(size)
            raise OSError(f"{path} was not written: no space left on the disk")
