"""The index of the image files in a folder: one process per node scans the folder and saves it."""

import errno
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ddp_trainer.config.errors import TransientError, path_error, printable
from ddp_trainer.data.dataset import BadImageError
from ddp_trainer.files import lock_file, replace_file
from ddp_trainer.progress import show_progress

logger = logging.getLogger(__name__)

EXTENSIONS = tuple(b".avif .bmp .gif .jpeg .jpg .npy .png .ppm .tif .tiff .webp".split())
IMAGE_FILES = f"files that end in {b', '.join(EXTENSIONS).decode()}"
MAX_BYTES = 2**30
"""Size of the largest file that is read, so that those of several threads fit into memory."""
SCAN_THREADS = 8
"""Number of threads that scan folders: more than cores, because they wait for the file system."""
LOCK_SECONDS = 3600.0
"""How long a rank waits for another rank that scans the folder."""
MIN_AGE_SECONDS = 3.0
"""An index is saved if its folders are unchanged for so long, because file systems round times."""
NUM_CHECKED_FILES = 1000
"""Number of files that `is_current` compares: overwriting one does not change its folder's time."""

Array = np.ndarray[Any, np.dtype[Any]]
File = tuple[bytes, int, int]
"""Name (path relative to the root folder), size in bytes, and modification time in ns."""


def read_file(path: str | Path) -> Array:
    """Return the content of a file, uint8 [bytes].

    Raises:
        BadImageError: it has more than `MAX_BYTES`, or is a pipe or a device, which may never end.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise BadImageError("it is not a regular file")
    if status.st_size > MAX_BYTES:
        raise BadImageError(f"it has {status.st_size:,} bytes, and the maximum is {MAX_BYTES:,}")
    return np.fromfile(path, np.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileIndex:
    """The image files of a data set below the folder `root`, sorted by class and name."""

    root: Path
    saved_in: Path | None
    """The file in which this index may be saved; None if it is never saved."""
    class_names: list[str]
    """The name of each class; `scan` takes the names of folders. A class may have no image."""
    counts: Array
    """int64 [classes]: number of images of each class."""
    files: Array
    """[N]: name, size and time of each image, see `File`."""
    folders: Array
    """[folders]: name, size and time of each scanned folder, see `File`."""
    splits: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [N]: the number of the split of each image; [0] if the folder is one split."""
    groups: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [N]: the number of the group of each image; [0] if no groups are known."""
    weights: Array = field(default_factory=lambda: np.zeros(0))
    """float64 [N]: the weight of each image in `data.sampling`; [0] if none are known."""
    broken_links: Array = field(default_factory=lambda: np.zeros(0, "S1"))
    """[links]: name of each symbolic link with the name of an image that leads to no file."""

    def __len__(self) -> int:
        return len(self.files)

    def part(self, mask: Array) -> "FileIndex":
        """Return the index of the images that `mask`, bool [N], selects."""
        label = np.repeat(np.arange(len(self.counts)), self.counts)
        return replace(
            self,
            counts=np.bincount(label[mask], minlength=len(self.counts)),
            files=self.files[mask],
            splits=self.splits[mask],
            groups=self.groups[mask] if len(self.groups) else self.groups,
            weights=self.weights[mask] if len(self.weights) else self.weights,
        )

    def path(self, index: int) -> str:
        """Return the path of the file `index`."""
        return os.path.join(self.root, os.fsdecode(self.files["name"][index]))

    def read(self, index: int) -> Array:
        """Return the content of the file `index`, uint8 [bytes].

        Raises:
            BadImageError, OSError: the file is too large, or cannot be read.
            TransientError: the file's size differs from the scan; the saved index is removed.
        """
        path = self.path(index)
        data = read_file(path)
        size = self.files["size"][index]
        if len(data) != size:
            if self.saved_in is not None:
                with suppress(OSError):
                    self.saved_in.unlink()
            raise TransientError(
                f"{path} cannot be read: its size changed from {size} to {len(data)} bytes after"
                " the scan: start the run again"
            )
        return data

    def digest(self, *, with_times: bool = False) -> str:
        """Return a hex digest of class names, file names and sizes, and of times if `with_times`.

        Without times, the digest is equal for copies of the files on other nodes.
        """
        digest = hashlib.sha256("\0".join(self.class_names).encode(errors="surrogateescape"))
        digest.update(self.counts.data)
        digest.update(b"\0".join(self.files["name"].tolist()))
        for name in ("size", "time") if with_times else ("size",):
            digest.update(self.files[name].tobytes())
        return digest.hexdigest()

    def is_consistent(self) -> bool:
        """Return whether all fields have the types, and the lengths, that `scan` gives them."""
        names = self.class_names
        has_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
        has_files = all(
            array.ndim == 1 and array.dtype == file_type(array.dtype["name"].itemsize)
            for array in (self.files, self.folders)
        )
        has_numbers = all(
            array.dtype == dtype and array.shape in ((0,), self.files.shape)
            for array, dtype in (
                (self.splits, np.int64),
                (self.groups, np.int64),
                (self.weights, np.float64),
            )
        )
        counts = self.counts
        has_counts = counts.dtype == np.int64 and counts.shape == (len(names),)
        return (
            has_names
            and has_files
            and has_numbers
            and has_counts
            and self.broken_links.ndim == 1
            and self.broken_links.dtype.kind == "S"
            and bool((counts >= 0).all())
            and int(counts.sum()) == len(self.files)
        )

    def is_current(self) -> bool:
        """Return whether size and time of all folders, and of some files, are those of the scan.

        The files are evenly spaced. Of the broken links, too, some must still be broken, because a
        file at the end of a link does not change the link's folder. Raises OSError if a folder or
        file does not exist any more.
        """
        checked = self.files[:: len(self) // NUM_CHECKED_FILES + 1]
        expected = [*self.folders.tolist(), *checked.tolist()]
        root = os.fsencode(self.root)
        links = self.broken_links[:: len(self.broken_links) // NUM_CHECKED_FILES + 1].tolist()
        if any(os.path.exists(os.path.join(root, name)) for name in links):
            return False
        with ThreadPoolExecutor(SCAN_THREADS) as pool:
            return list(pool.map(lambda file: stat_file(root, file[0]), expected)) == expected


def stat_file(root: bytes, name: bytes) -> File:
    """Return the `File` of the file or folder `name` in `root`; OSError if it does not exist."""
    status = os.stat(os.path.join(root, name))
    return name, status.st_size, status.st_mtime_ns


def is_image(entry: os.DirEntry[str]) -> bool:
    """Return whether `entry` is a file whose name ends as that of an image."""
    return os.fsencode(entry.name).lower().endswith(EXTENSIONS) and entry.is_file()


@contextmanager
def path_errors() -> Iterator[None]:
    """Turn an OSError inside the context into the error of `path_error`, which names the path."""
    try:
        yield
    except OSError as error:
        path = os.fsdecode(error.filename)
        raise path_error(
            error, f"{path} cannot be read ({error.strerror}): make it readable, or remove it"
        ) from error


def load_index(root: Path, cache_dir: Path) -> FileIndex:
    """Return the index of `root` saved in `cache_dir`; if none is current, scan `root` and save it.

    Broken links cause a warning.

    Raises:
        ConfigError: a folder cannot be read, and the user can change the cause.
        TransientError: a folder cannot be read for another reason, another process takes too long
            to scan, or the file system has no locks.
    """
    path = cache_dir / f"{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]}.index"
    index = saved_index(root, path, lambda path: scan(root, path))
    warn_of_broken_links(root, index.broken_links.tolist())
    return index


def saved_index(root: Path, path: Path, make: Callable[[Path], FileIndex]) -> FileIndex:
    """Return the index of `root` in the file `path`; if it is not current, ``make(path)`` it.

    One process of a node makes and saves it, and the others wait and read it. If the folder of
    `path` cannot be written, each process makes it.
    """
    if (saved := read_index(path, root)) is not None:
        return saved
    holder = f"another process has been scanning {root} for an hour: end it if it hangs"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(path.with_suffix(".lock"), seconds=LOCK_SECONDS, holder=holder):
            return read_index(path, root) or save_index(make(path), path)
    except OSError:
        return make(path)


def scan(root: Path, path: Path) -> FileIndex:
    """Scan `root`, and return its index. path: the file in which the caller may save the index.

    Raises the error of `path_errors` if a folder cannot be read.
    """
    with (
        path_errors(),
        show_progress(f"scanning {root}") as advance,
        ThreadPoolExecutor(SCAN_THREADS) as pool,
    ):
        top = os.fsencode(root)
        folders = [stat_file(top, b"")]
        broken: list[bytes] = []

        def scan_class(name: str) -> list[File]:
            files = sorted(walk(top, os.fsencode(name), folders, broken, set()))
            advance(len(files))
            return files

        entries = [entry for entry in os.scandir(root) if not entry.name.startswith(".")]
        classes = sorted(entry.name for entry in entries if entry.is_dir())
        files_by_class = list(pool.map(scan_class, classes))
    return FileIndex(
        root=root,
        saved_in=path,
        class_names=classes,
        counts=np.array(list(map(len, files_by_class)), np.int64),
        files=as_array(list(chain.from_iterable(files_by_class))),
        folders=as_array(folders),
        broken_links=np.array(sorted(broken), np.bytes_),
    )


def index_files(paths: Sequence[Path], labels: Sequence[int], class_names: list[str]) -> FileIndex:
    """Return an index of the files `paths` with the classes `labels`, sorted by class and path.

    Raises the error of `path_errors` if a file is missing or not accessible.
    """
    names = list(map(os.fsencode, paths))
    root = os.path.commonpath(map(os.path.dirname, names))
    ordered = sorted(zip(labels, names, strict=True))
    with path_errors():
        files = [stat_file(root, os.path.relpath(name, root)) for _, name in ordered]
    return FileIndex(
        root=Path(os.fsdecode(root)),
        saved_in=None,
        class_names=class_names,
        counts=np.bincount(labels, minlength=len(class_names)),
        files=as_array(files),
        folders=as_array([]),
    )


def as_array(files: list[File]) -> Array:
    """Return `files` as a structured array, [N], with the fields name, size and time."""
    return np.array(files, file_type(max((len(name) for name, _, _ in files), default=1)))


def file_type(length: int) -> np.dtype[Any]:
    """Return the type of a `File` whose name has at most `length` bytes."""
    return np.dtype([("name", f"S{length}"), ("size", np.int64), ("time", np.int64)])


def warn_of_broken_links(root: str | Path, names: Sequence[bytes]) -> None:
    """Log a warning if there are broken links, for example because git-annex has no contents."""
    if names:
        logger.warning(
            "%s has %s symbolic links that lead to no file, for example %s: these images are left"
            " out",
            root,
            f"{len(names):,}",
            printable(os.fsdecode(names[0])),
        )


def walk(
    root: bytes,
    folder: bytes,
    folders: list[File],
    broken_links: list[bytes],
    visited: set[tuple[int, int]],
) -> Iterator[File]:
    """Yield each image file in `folder` and in its subfolders. `folder` is relative to `root`.

    Each folder is added to `folders`, each link with the name of an image that leads to no file to
    `broken_links`, and the device and inode of each folder to `visited`, so that no folder is read
    twice because of a symbolic link. Raises OSError if a folder cannot be read.
    """
    path = os.path.join(root, folder)
    status = os.stat(path)
    if (status.st_dev, status.st_ino) in visited:
        return
    visited.add((status.st_dev, status.st_ino))
    folders.append((folder, status.st_size, status.st_mtime_ns))
    with os.scandir(path) as entries:
        for entry in entries:
            name = os.path.join(folder, entry.name)
            is_named_so = entry.name.lower().endswith(EXTENSIONS)
            # because hidden files, for example ._x.jpg of macOS, are often not images
            if entry.name.startswith(b"."):
                continue
            try:
                is_file = entry.is_file()
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                broken_links += [name] * is_named_so  # a link to itself
                continue
            if is_named_so and is_file:
                found = entry.stat()
                yield name, found.st_size, found.st_mtime_ns
            elif entry.is_dir():
                yield from walk(root, name, folders, broken_links, visited)
            elif is_named_so and entry.is_symlink() and not os.path.exists(entry):
                broken_links.append(name)


def save_index(index: FileIndex, path: Path) -> FileIndex:
    """Save `index` in `path` if possible, unless a folder changed just now; return `index`."""
    if time.time_ns() - int(index.folders["time"].max()) > MIN_AGE_SECONDS * 1e9:
        with suppress(OSError), replace_file(path) as file:
            np.savez(
                file,
                allow_pickle=False,
                class_names=index.class_names,
                counts=index.counts,
                files=index.files,
                folders=index.folders,
                splits=index.splits,
                groups=index.groups,
                weights=index.weights,
                broken_links=index.broken_links,
            )
    return index


def read_index(path: Path, root: Path) -> FileIndex | None:
    """Return the index in `path`; None if it is missing, damaged or not current."""
    try:
        if not path.is_file():  # a pipe, for example, would be waited for
            return None
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
            content: dict[str, Any] = dict(saved)
        content["class_names"] = content["class_names"].tolist()
        index = FileIndex(root=root, saved_in=path, **content)
        return index if index.is_consistent() and index.is_current() else None
    except Exception:  # because a damaged file may raise any exception
        return None
