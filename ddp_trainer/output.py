"""Files that commands write for the user."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedRandom
from pathlib import Path

from ddp_trainer.config.errors import path_error, require
from ddp_trainer.files import lock_file, remove_unfinished, replace_file

LOCK_SECONDS = 60.0
OTHER_OUTPUT = "; set output=… to a path that can be written"


@contextmanager
def output_file(
    path: Path, *, fix: str = ": name another path", begin: bytes = b""
) -> Iterator[BufferedRandom]:
    """Yield a temporary file, which is renamed to `path` if the ``with`` block succeeds.

    Creates the folder of `path`. fix: the end of the message of an error. begin: the first bytes of
    each file of this kind; a file with other content is not replaced, unless it is empty.

    Raises:
        ConfigError, TransientError: the file cannot be written; an old file at `path` is unchanged.
    """
    require(
        not os.path.lexists(path) or is_replaceable(path),  # another process may create it
        f"{path} is a folder, a device or a broken link, which is not replaced{fix}",
    )
    try:
        if path.exists():
            with open(path, "rb") as old:
                is_own = old.read(len(begin)) in (b"", begin)
            require(
                is_own,
                f"{path} does not look like a file of this command, and is not replaced{fix}",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as file:
            yield file
    except OSError as error:
        raise path_error(
            error, f"{path} cannot be written: {error.strerror or error}{fix}"
        ) from error


def is_replaceable(path: Path) -> bool:
    """Return whether `path` is a file, or a link to one, and no link such as /dev/stdout."""
    leads_to_process = path.is_symlink() and os.readlink(path).startswith("/proc/")
    return os.path.isfile(path) and not leads_to_process


@contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Create and lock `folder`, and remove temporary files that killed processes left in it.

    Raises:
        ConfigError, TransientError: the folder cannot be written, or another process writes to it.
    """
    holder = f"another process is writing to {folder}: wait for it, and start the command again"
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_file(folder / ".lock", seconds=LOCK_SECONDS, holder=holder))
            remove_unfinished(folder)
        except OSError as error:
            raise path_error(
                error, f"{folder} cannot be written: {error.strerror or error}{OTHER_OUTPUT}"
            ) from error
        yield
