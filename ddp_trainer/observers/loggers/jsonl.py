"""``logger=jsonl``: metrics.jsonl, one JSON object a line with ``time``, ``step`` and the tags."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_trainer.config.loggers import JsonlConfig
from ddp_trainer.files import open_to_append, replace_text
from ddp_trainer.observers.loggers.base import Logger, Value

MAX_PENDING = 10_000
"""How many records stay in memory while the disk is full; they are written when it has space."""


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
        record: dict[str, Value] = {"time": time.time(), "step": step}
        for tag, value in values.items():
            is_plain = isinstance(value, str) or math.isfinite(value)
            record[tag] = value if is_plain else str(value)
        self.pending = [*self.pending[-MAX_PENDING:], json.dumps(record) + "\n"]
        data = "".join(self.pending).encode()
        with open_to_append(self.path) as file:
            size = file.tell()
            if file.write(data) < len(data):
                file.truncate(size)
                raise OSError(f"{self.path} was not written: no space left on the disk")
        self.pending.clear()

    def flush(self) -> None:
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            os.fsync(file.fileno())


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line that is a JSON object with an integer ``step``, and the object."""
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield line, record
