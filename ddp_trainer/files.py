"""Files that are written completely or not at all, and locks."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedRandom
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ddp_trainer.config.errors import TransientError


@contextmanager
def replace_file(path: Path) -> Iterator[BufferedRandom]:
    """Yield a temporary file, synced and renamed to `path` at the end, deleted on an error."""
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
    """Yield each line that is a JSON object with an integer ``step``, and the object."""
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield line, record


def exclude_node(run_dir: Path, node: str) -> None:
    """Exclude `node` from the next launch of launch/slurm.sbatch; a full disk is no error."""
    with suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        with open(run_dir / "excluded_nodes", "a") as file:
            file.write(f"{node}\n")


@contextmanager
def lock_file(path: Path, *, seconds: float, holder: str) -> Iterator[None]:
    """Lock `path` inside the context; wait up to `seconds` for another process to release it.

    The kernel releases the lock when this process ends, however it ends. The file stays.

    Raises:
        TransientError: with the text `holder`, if another process keeps the lock; or if the file
        system has no locks.
    """
    path.touch()  # raises the OSError of a folder that cannot be written
    with ExitStack() as stack:
        try:
            # not a soft lock (a file that exists), because a killed process would leave it locked
            stack.enter_context(FileLock(path, timeout=seconds, fallback_to_soft=False))
        except Timeout as error:
            raise TransientError(holder) from error
        except OSError as error:
            raise TransientError(
                f"{path.parent} cannot be locked ({error.strerror}): mount the file system with"
                " locks (Lustre: -o flock), or choose another folder"
            ) from error
        yield
