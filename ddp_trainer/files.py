"""Files: complete replacement, locks, and checks of pickles and archives of a stranger."""

import os
import secrets
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedRandom
from pathlib import Path
from pickletools import genops, markobject
from typing import IO, Any

from filelock import FileLock, Timeout

from ddp_trainer.config.errors import TransientError

MAX_TUPLE_ITEMS = 100_000
"""How many items a tuple in a pickle may have, together with those of the tuples in it."""
UNHASHED = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "LIST", "DICT", "FROZENSET")
"""The operations of a pickle whose result has no hash, or keeps its hash."""


@contextmanager
def replace_file(path: Path) -> Iterator[BufferedRandom]:
    """Yield a temporary file; at the end sync it and rename it to `path`, or delete it on an error.

    The temporary file has a random name and must not exist, because in a folder of another user, a
    link with a known name could lead to any file of this user.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.writing")
    try:
        with open(temporary, "x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def held_folder(folder: Path, *, flags: int = 0) -> Iterator[Path]:
    """Yield a path that leads to `folder` even if a link takes its name, on Linux (/proc).

    flags: further ones for os.open.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        path = Path(f"/proc/self/fd/{descriptor}")
        yield path if path.exists() else folder
    finally:
        os.close(descriptor)


def open_to_append(path: Path) -> IO[bytes]:
    """Open `path` to append to it, without a buffer; OSError if it is a link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o666), "ab", buffering=0)


@contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    """Create `folder` in a run directory, and yield a path as `held_folder`; OSError if a link."""
    folder.mkdir(exist_ok=True)
    with held_folder(folder, flags=os.O_NOFOLLOW) as path:
        yield path


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` with `replace_file`."""
    with replace_file(path) as file:
        file.write(text.encode())


def check_pickle(file: IO[bytes]) -> None:
    """Check the sizes of the tuples in a pickle of a stranger, from the position of `file` on.

    A short pickle can have a key of pairs, (x, x) with x = (y, y) and so on: its hash takes years.
    Nothing is loaded: this does with the sizes of objects what an unpickler does with the objects.

    Raises:
        Exception: it is no pickle, or a tuple has more than `MAX_TUPLE_ITEMS` items (ValueError).
    """
    stack: list[int] = []  # 0 is a mark
    memo: dict[Any, int] = {}
    for operation, argument, _ in genops(file):
        name = operation.name
        operands = operation.stack_before
        sizes = []
        if markobject in operands:
            operands = operands[: operands.index(markobject)]
            sizes = list(iter(stack.pop, 0))
        sizes += [stack.pop() for _ in operands]
        size = memo[argument] if name.endswith("GET") else 1 + sum(sizes) * (name not in UNHASHED)
        if size > MAX_TUPLE_ITEMS:
            raise ValueError(f"it has a tuple of more than {MAX_TUPLE_ITEMS:,} items")
        stack += [0 if name == "MARK" else size] * len(operation.stack_after)
        if name.endswith("PUT") or name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = stack[-1]


def check_archive(file: IO[bytes]) -> None:
    """Check that an archive of torch.save is no larger in memory than on disk, and its pickles.

    torch.save stores its members without compression. A compressed one could fill the memory.

    Raises:
        ValueError: a member is compressed, has another size, or is rejected by `check_pickle`.
        zipfile.BadZipFile: the file is no archive.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        for member in members:
            if member.filename.lower().endswith(".pkl"):  # as torch compares names
                with archive.open(member) as pickle:
                    check_pickle(pickle)
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("it has a compressed member, which torch.save does not write")
    # zipfile adds what precedes an archive to all places; torch would read another list of members
    if archive.comment or min((member.header_offset for member in members), default=0) > 0:
        raise ValueError("its first member is not at its begin, or it has a comment")
    size = file.seek(0, 2)
    if sum(member.file_size for member in members) > size:
        raise ValueError("its members are larger than the file")


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files that processes left in `folder` because they were killed."""
    for path in folder.glob(".*.writing"):
        with suppress(OSError):
            path.unlink()


@contextmanager
def lock_file(path: Path, *, seconds: float, holder: str) -> Iterator[None]:
    """Lock `path` inside the context; wait up to `seconds` for another process to release it.

    The kernel releases the lock when this process ends, however it ends. The file stays.

    Raises:
        TransientError: another process keeps the lock (the message is `holder`), or the file system
            has no locks.
        OSError: the folder cannot be written, or `path` is a link.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
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
