"""Files that are written completely or not at all, and locks."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom
from pathlib import Path
from typing import Any

from ddp_trainer.config.errors import TransientError


@contextmanager
def replace_file(path: Path) -> Iterator[BufferedRandom]:
    """Yield a temporary file, which is synced to disk and renamed to `path` at the end, or deleted
    after an error.
    """
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` with `replace_file`."""
    with replace_file(path) as file:
        file.write(text.encode())


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line that is a JSON object with an integer ``step``, and the object; skip all
    other lines.
    """
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield line, record


def exclude_node(run_dir: Path, node: str) -> None:
    """Add `node` to the nodes that launch/slurm.sbatch excludes when it requeues its job. A full
    disk is no error.
    """
    with suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        with open(run_dir / "excluded_nodes", "a") as file:
            file.write(f"{node}\n")


@contextmanager
def lock_file(path: Path, *, seconds: float, holder: str) -> Iterator[None]:
    """Lock `path` inside the context; TransientError, with the text `holder`, if another process
    keeps it `seconds`.

    The kernel releases the lock when this process ends, however it ends.
    """
    with open(path, "ab") as file:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TransientError(holder) from None
                time.sleep(0.1)
            except OSError as error:
                raise TransientError(
                    f"{path.parent} cannot be locked ({error.strerror}): mount the file system with"
                    " locks (Lustre: -o flock), or choose another folder"
                ) from error
        yield
