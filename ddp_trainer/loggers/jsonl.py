"""``logger=jsonl``: metrics.jsonl, one JSON object a line with ``time``, ``step``, ``epoch`` and the tags as keys."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddp_trainer.config.loggers import JsonlConfig
from ddp_trainer.distributed.files import replace_text
from ddp_trainer.loggers.base import Logger, Value

MAX_PENDING = 10_000
"""Records kept while the disk is full, to be written when there is room again."""


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
        record: dict[str, Any] = {"time": time.time(), "step": step}
        for tag, value in values.items():
            is_plain = isinstance(value, str) or math.isfinite(value)
            record[tag] = value if is_plain else str(value)
        self.pending = [*self.pending[-MAX_PENDING:], json.dumps(record) + "\n"]
        append("".join(self.pending), self.path)
        self.pending.clear()


def append(text: str, path: Path) -> None:
    """Append `text` to `path`, all of it or nothing.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        data = text.encode()
        if os.write(descriptor, data) < len(data):
            os.ftruncate(descriptor, size)
            raise OSError(f"{path} was not written: no space left on the disk")
    finally:
        os.close(descriptor)


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line of metrics.jsonl that is a whole record, with the record. Damaged lines are left out."""
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record
