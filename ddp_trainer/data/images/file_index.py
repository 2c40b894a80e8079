"""The image files of a folder: scanned by threads once per node, and saved in a file."""

import hashlib
import os
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ddp_trainer.config.errors import path_error
from ddp_trainer.files import lock_file, replace_file
from ddp_trainer.progress import show_progress

EXTENSIONS = tuple(b".avif .bmp .gif .jpeg .jpg .png .ppm .tif .tiff .webp".split())
IMAGE_FILES = f"files that end in {b', '.join(EXTENSIONS).decode()}"
SCAN_THREADS = 8
"""Threads that scan folders: more than cores, because they wait for the file system."""
LOCK_SECONDS = 3600.0
"""How long a rank waits for another rank that scans."""
MIN_AGE_SECONDS = 3.0
"""Time without a change of a folder before it is saved: file systems round such times."""
NUM_CHECKED_FILES = 1000
"""Number of files to compare: overwriting a file does not change its folder's time."""

SAVED = ("class_names", "counts", "files", "folders")
"""The fields of an index that its file has."""

Array = np.ndarray[Any, np.dtype[Any]]
File = tuple[bytes, int, int]
"""Name relative to the root folder, size in bytes, and modification time in ns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileIndex:
    """The images below the class folders of `root`, sorted by class and name."""

    root: Path
    saved_in: Path
    """The file for this index, even if it could not be saved."""
    class_names: list[str]
    """The name of each class; in `scan`, the sorted class folders. A class may have no image."""
    counts: Array
    """int64 [classes]: number of images of each class."""
    files: Array
    """[N]: name, size and time of each image, see `File`."""
    folders: Array
    """[folders]: name, size and time of all folders that were read."""

    def __len__(self) -> int:
        return len(self.files)

    def path(self, index: int) -> bytes:
        """Return the path of the file `index`."""
        return os.path.join(os.fsencode(self.root), self.files["name"][index])

    def digest(self, *, with_times: bool = False) -> str:
        """Return a digest of names and sizes, and of times if `with_times`.

        Without times, it is equal for copies of the files on other nodes.
        """
        digest = hashlib.sha256("\0".join(self.class_names).encode(errors="surrogateescape"))
        digest.update(self.counts.data)
        digest.update(b"\0".join(self.files["name"].tolist()))
        for field in ("size", "time") if with_times else ("size",):
            digest.update(self.files[field].tobytes())
        return digest.hexdigest()

    def is_current(self) -> bool:
        """Return whether all folders and `NUM_CHECKED_FILES` files are as in the scan.

        Raises OSError if one of them does not exist any more.
        """
        count = min(NUM_CHECKED_FILES, len(self))
        chosen = np.linspace(0, len(self) - 1, count).astype(np.int64)
        expected = [*self.folders.tolist(), *self.files[chosen].tolist()]
        with ThreadPoolExecutor(SCAN_THREADS) as pool:
            found = pool.map(partial(stat_file, os.fsencode(self.root)), [e[0] for e in expected])
            return list(found) == expected


def stat_file(root: bytes, name: bytes) -> File:
    """Return the `File` of a file or folder."""
    status = os.stat(os.path.join(root, name))
    return name, status.st_size, status.st_mtime_ns


@contextmanager
def path_errors() -> Iterator[None]:
    """Name the path of an OSError inside the context in a ConfigError or TransientError."""
    try:
        yield
    except OSError as error:
        message = f"{os.fsdecode(error.filename)} cannot be read: {error.strerror}"
        raise path_error(error, message) from error


def load_index(root: Path, cache_dir: Path) -> FileIndex:
    """Return the index of `root` that is saved in `cache_dir`; if it is not current, scan and save.

    The processes of a node scan one at a time. If `cache_dir` cannot be written, each process
    scans. If a folder cannot be read, raises ConfigError, or TransientError where the user cannot
    change the cause.
    """
    path = cache_dir / f"{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]}.index"
    if (saved := read_index(path, root)) is not None:
        return saved
    holder = f"another process has been scanning {root} for an hour: is it still running?"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with lock_file(path.with_suffix(".lock"), seconds=LOCK_SECONDS, holder=holder):
            return read_index(path, root) or save_index(scan(root, path))
    except OSError:
        return scan(root, path)


def scan(root: Path, path: Path) -> FileIndex:
    """Scan `root` and return its index. path: the file in which it can be saved.

    If a folder cannot be read, raises ConfigError, or TransientError where the user cannot change
    the cause.
    """
    with (
        path_errors(),
        show_progress(f"scanning {root}") as advance,
        ThreadPoolExecutor(SCAN_THREADS) as pool,
    ):
        folders = [stat_file(os.fsencode(root), b"")]
        entries = [entry for entry in os.scandir(root) if not entry.name.startswith(".")]
        classes = sorted(entry.name for entry in entries if entry.is_dir())

        def scan_class(name: str) -> list[File]:
            files = sorted(walk(os.fsencode(root), os.fsencode(name), folders, set()))
            advance(len(files))
            return files

        parts = list(pool.map(scan_class, classes))
    return build_index(root, path, classes, parts, folders)


def index_files(
    paths: Sequence[Path], labels: Sequence[int], class_names: list[str], cache_dir: Path
) -> FileIndex:
    """Return the index of `paths`, whose class numbers are `labels`, sorted by class and name.

    If a file cannot be read, raises ConfigError, or TransientError where the user cannot change the
    cause.
    """
    names = list(map(os.fsencode, paths))
    root = os.path.commonpath(map(os.path.dirname, names))
    parts: list[list[File]] = [[] for _ in class_names]
    with path_errors():
        for label, name in sorted(zip(labels, names, strict=True)):
            parts[label].append(stat_file(root, os.path.relpath(name, root)))
    folder = Path(os.fsdecode(root))
    return build_index(folder, cache_dir / "none.index", class_names, parts, folders=[])


def build_index(
    root: Path,
    saved_in: Path,
    class_names: list[str],
    parts: Sequence[list[File]],
    folders: list[File],
) -> FileIndex:
    """Return the index of the files below `root`.

    parts: the files of each class; folders: the folders that were read; saved_in: the file for the
    index.
    """
    return FileIndex(
        root=root,
        saved_in=saved_in,
        class_names=class_names,
        counts=np.array(list(map(len, parts)), np.int64),
        files=as_array([file for part in parts for file in part]),
        folders=as_array(folders),
    )


def as_array(files: list[File]) -> Array:
    """Return `files` as an array with the fields name, size and time."""
    longest = max((len(name) for name, _, _ in files), default=1)
    return np.array(files, [("name", f"S{longest}"), ("size", np.int64), ("time", np.int64)])


def walk(
    root: bytes, folder: bytes, folders: list[File], visited: set[tuple[int, int]]
) -> Iterator[File]:
    """Yield each image in `folder` and below it as a `File` relative to `root`.

    Each folder is read once, and added to `folders`; its device and inode are added to `visited`.
    """
    path = os.path.join(root, folder)
    status = os.stat(path)
    if (status.st_dev, status.st_ino) in visited:  # a link to a folder that was visited
        return
    visited.add((status.st_dev, status.st_ino))
    folders.append((folder, status.st_size, status.st_mtime_ns))
    with os.scandir(path) as entries:
        for entry in entries:
            name = os.path.join(folder, entry.name)
            # for example the ._x.jpg of macOS, which are not images
            if entry.name.startswith(b"."):
                continue
            if entry.name.lower().endswith(EXTENSIONS) and entry.is_file():
                found = entry.stat()
                yield name, found.st_size, found.st_mtime_ns
            elif entry.is_dir():
                yield from walk(root, name, folders, visited)


def save_index(index: FileIndex) -> FileIndex:
    """Return `index`, after trying to save it unless a folder changed just now."""
    if len(index) and time.time_ns() - int(index.folders["time"].max()) > MIN_AGE_SECONDS * 1e9:
        content: dict[str, Any] = {name: getattr(index, name) for name in SAVED}
        with suppress(OSError), replace_file(index.saved_in) as file:
            np.savez(file, allow_pickle=False, **content)
    return index


def read_index(path: Path, root: Path) -> FileIndex | None:
    """Return the index in `path`; None if it is missing, damaged or not current."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
            content: dict[str, Any] = dict(saved)
        content["class_names"] = content["class_names"].tolist()
        index = FileIndex(root=root, saved_in=path, **content)
        return index if index.is_current() else None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
