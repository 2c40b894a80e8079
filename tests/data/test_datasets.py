"""The images of each data set: digits from the package, Fashion-MNIST from any folder, noise of any
shape.
"""

import functools
import gc
import gzip
import hashlib
import http.server
import os
import socket
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from image_sets import needs_fashion_mnist
from processes import on_ranks
from runs import compose
from test_idx import encode
from torchvision.datasets import FashionMNIST

from ddp_trainer.config.data import DigitsConfig, FashionMnistConfig, SyntheticConfig
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.images import AugmentConfig, DataConfig
from ddp_trainer.data.build import build_datasets
from ddp_trainer.data.dataset import ImageTensors
from ddp_trainer.data.datasets import fashion_mnist as module
from ddp_trainer.data.datasets.fashion_mnist import DEBIAN_FOLDER, FILES, download, locate


class Resident(NamedTuple):
    """The splits of a data set that is kept in memory."""

    train: ImageTensors
    eval: ImageTensors


def build_resident(config: DataConfig) -> Resident:
    datasets = build_datasets(config)
    assert isinstance(datasets.train, ImageTensors)
    assert isinstance(datasets.eval, ImageTensors)
    return Resident(datasets.train, datasets.eval)


def digits(**options: Any) -> DigitsConfig:
    values: dict[str, Any] = {"mean": [0.5], "std": [0.5]} | options
    return DigitsConfig(**values)


def fashion_mnist(root: Path | None = None) -> FashionMnistConfig:
    return FashionMnistConfig(mean=[0.5], std=[0.5], root=None if root is None else str(root))


# --- a validation split -------------------------------------------------------------------------


def rows(images: torch.Tensor) -> Counter[bytes]:
    return Counter(image.numpy().tobytes() for image in images)


def test_a_validation_split_is_held_out_of_the_training_split_and_fixed() -> None:
    whole = build_resident(digits())
    one, other = (build_resident(digits(validation_fraction=0.1)) for _ in range(2))
    assert (len(one.train), len(one.eval)) == (1298, 144)
    assert rows(one.train.images) + rows(one.eval.images) == rows(whole.train.images)
    assert torch.equal(one.eval.images, other.eval.images)
    assert torch.equal(one.train.labels, other.train.labels)
    with pytest.raises(
        ConfigError, match=r"data.validation_fraction=0.0001 of 1442 training images"
    ):
        build_resident(digits(validation_fraction=0.0001))


# --- digits -------------------------------------------------------------------------------------


def test_digits_are_split_four_to_one_in_every_class() -> None:
    splits = build_resident(digits())
    again = build_resident(digits())
    assert (splits.train.images.shape, len(splits.eval)) == ((1442, 1, 8, 8), 355)
    assert len(build_datasets(digits()).class_names) == 10
    assert (splits.train.images.dtype, int(splits.train.images.max())) == (torch.uint8, 240)
    for label in range(10):
        train, held_out = (
            int((part.labels == label).sum()) for part in (splits.train, splits.eval)
        )
        assert held_out == (train + held_out) // 5
    assert len(rows(splits.train.images) | rows(splits.eval.images)) == 1797  # disjoint
    assert torch.equal(splits.train.images, again.train.images)


@pytest.mark.parametrize(
    "name", ["digits", pytest.param("fashion_mnist", marks=needs_fashion_mnist)]
)
def test_the_configured_mean_and_deviation_are_those_of_the_training_images(name: str) -> None:
    config = compose(f"data={name}").data
    pixels = build_resident(config).train.images.double() / 255
    assert config.mean == pytest.approx([pixels.mean().item()], abs=5e-5)
    assert config.std == pytest.approx([pixels.std().item()], abs=5e-5)


def test_images_that_the_config_does_not_fit_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"data\.mean=\[0, 0, 0\] and data.std must each have one value per channel",
    ):
        build_resident(digits(mean=[0, 0, 0], std=[1, 1, 1]))
    with pytest.raises(
        ConfigError, match=r"random_crop_padding=8 must be smaller than the images of 8×8 pixels"
    ):
        build_resident(digits(augment=AugmentConfig(random_crop_padding=8)))


# --- Fashion-MNIST in a folder ------------------------------------------------------------------


def write_small_set(
    folder: Path, *, pack: Callable[[bytes], bytes] = bytes, suffix: str = ""
) -> Path:
    """Write 6 training and 4 test images of 5×5 pixels as Fashion-MNIST's four files."""
    folder.mkdir(exist_ok=True)
    for prefix, count in (("train", 6), ("t10k", 4)):
        images = torch.arange(count * 25, dtype=torch.uint8).view(count, 5, 5)
        labels = torch.arange(count, dtype=torch.uint8)
        (folder / f"{prefix}-images-idx3-ubyte{suffix}").write_bytes(pack(encode(images)))
        (folder / f"{prefix}-labels-idx1-ubyte{suffix}").write_bytes(pack(encode(labels)))
    return folder


@pytest.mark.parametrize(("pack", "suffix"), [(bytes, ""), (gzip.compress, ".gz"), (bytes, ".gz")])
def test_a_folder_of_raw_or_compressed_files_is_read(
    pack: Callable[[bytes], bytes], suffix: str, tmp_path: Path
) -> None:
    splits = build_resident(
        fashion_mnist(write_small_set(tmp_path / "root", pack=pack, suffix=suffix))
    )
    assert splits.train.images.flatten().tolist() == list(range(150))
    assert splits.train.images.shape == (6, 1, 5, 5)
    assert splits.eval.labels.tolist() == [0, 1, 2, 3]


@needs_fashion_mnist
def test_debians_files_are_the_real_ones() -> None:
    splits = build_resident(fashion_mnist())
    assert splits.train.images.shape == (60_000, 1, 28, 28)
    assert splits.eval.images.shape == (10_000, 1, 28, 28)
    assert splits.train.labels.bincount().tolist() == [6000] * 10
    assert splits.eval.labels.bincount().tolist() == [1000] * 10


def zeros(*shape: int) -> bytes:
    return encode(torch.zeros(shape, dtype=torch.uint8))


DAMAGES = {
    "train-images-idx3-ubyte is damaged: it has 165 bytes and": (FILES[0], zeros(6, 5, 5)[:-1]),
    "train-images-idx3-ubyte is not an IDX file of images: it begins with 00 00 08 01": (
        FILES[0],
        zeros(6),
    ),
    "train labels must be int64 [6] and are torch.int64 [4]": (
        FILES[1],
        zeros(4),
    ),
    "eval labels must be 0 to 9 and are 0 to 10": (
        FILES[3],
        encode(torch.tensor([0, 1, 2, 10])),
    ),
    "images must have one shape: train has (1, 5, 5) and eval (1, 4, 4)": (
        FILES[2],
        zeros(4, 4, 4),
    ),
}


@pytest.mark.parametrize("expected", DAMAGES)
def test_a_damaged_set_is_refused_by_naming_the_file(expected: str, tmp_path: Path) -> None:
    root = write_small_set(tmp_path / "root")
    name, data = DAMAGES[expected]
    (root / name).write_bytes(data)
    with pytest.raises(ConfigError) as refused:
        build_resident(fashion_mnist(root))
    message = str(refused.value)
    if expected.startswith(("train ", "eval ", "images ")):
        assert message == f"data=fashion_mnist data.root={root}: {expected}"
    else:
        assert message.startswith(f"data.root={root}: ")
        assert expected in message
        assert "; put the four IDX files of Fashion-MNIST there, gzipped or not, or set" in message


@pytest.mark.parametrize("missing", [FILES[0], FILES[3], None])
def test_a_root_that_lacks_a_file_is_refused(missing: str | None, tmp_path: Path) -> None:
    root = write_small_set(tmp_path / "root") if missing else tmp_path / "nowhere"
    if missing:
        (root / missing).unlink()
    with pytest.raises(
        ConfigError,
        match=rf"^data\.root={root}: .*/{missing or FILES[0]}\.gz cannot be read \(.*\); put the",
    ):
        build_resident(fashion_mnist(root))


# --- the download -------------------------------------------------------------------------------


@contextmanager
def mirror(folder: Path) -> Iterator[tuple[str, Counter[str]]]:
    """Serve a folder over HTTP on this machine; yield the address, and the count of what it was
    asked for.
    """
    asked: Counter[str] = Counter()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            asked[self.path] += 1

        def log_message(self, format: str, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    ) as server:
        # torchvision hangs up on its first request
        server.handle_error = lambda request, client_address: None
        with ThreadPoolExecutor() as pool:
            pool.submit(server.serve_forever)
            try:
                yield f"http://127.0.0.1:{server.server_port}/", asked
            finally:
                server.shutdown()


def _download(url: str, folder: str) -> list[str]:
    os.environ["no_proxy"] = "127.0.0.1"
    FashionMNIST.mirrors = [url]
    # Debian packed the same arrays anew, so that the archives have other checksums
    FashionMNIST.resources = [
        (name, hashlib.md5((DEBIAN_FOLDER / name).read_bytes()).hexdigest())
        for name, _ in FashionMNIST.resources
    ]
    download(Path(folder))
    return sorted(path.name for path in Path(folder).iterdir())


@needs_fashion_mnist
def test_ranks_that_start_at_once_download_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "fashion_mnist"
    with mirror(DEBIAN_FOLDER) as (url, asked):
        assert on_ranks(3, _download, url, str(cache)) == [sorted(FILES)] * 3
    assert asked == {f"/{name}.gz": 2 for name in FILES}  # 1 more for torchvision's redirects
    assert sorted(path.name for path in cache.parent.iterdir()) == [
        "fashion_mnist",
        "fashion_mnist.lock",
    ]
    for name in FILES:
        assert (cache / name).read_bytes() == gzip.decompress(
            (DEBIAN_FOLDER / f"{name}.gz").read_bytes()
        )


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a machine without Debian's package and without a network; return where its cache would
    be.
    """
    monkeypatch.setattr(module, "DEBIAN_FOLDER", tmp_path / "usr")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache" / "torch"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(FashionMNIST, "mirrors", [])
    return tmp_path / "cache" / "torch"


def test_debians_files_are_found_before_those_in_the_cache(
    bare_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare_machine.mkdir(parents=True)
    cache = write_small_set(bare_machine / "fashion_mnist")
    debians = write_small_set(tmp_path / "usr")
    assert locate(None) == debians
    (debians / FILES[0]).unlink()
    assert locate(None) == cache
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/cache/torch/fashion_mnist") == cache
    (cache / FILES[0]).write_bytes(zeros(6, 5, 5)[:-1])
    with pytest.raises(
        ConfigError,
        match=r"^data\.root=null: .* is damaged: .*; put the four IDX files of Fashion-MNIST there",
    ):
        build_resident(fashion_mnist())


@pytest.mark.parametrize(
    "reason", ["Connection refused", "timed out", "HTTP Error 404", "corrupted"]
)
def test_a_download_that_fails_is_an_error_that_names_three_ways(
    reason: str, bare_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    www = tmp_path / "www"
    www.mkdir()
    with mirror(www) as (url, _), socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if reason in ("Connection refused", "timed out"):
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        if reason == "timed out":
            monkeypatch.setattr(module, "NETWORK_SECONDS", 0.2)
            silent.listen()
        elif reason == "corrupted":
            write_small_set(www, pack=gzip.compress, suffix=".gz")
        monkeypatch.setattr(FashionMNIST, "mirrors", [url])
        with pytest.raises(ConfigError) as refused:
            build_resident(fashion_mnist())
    message = str(refused.value)
    del refused
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # urllib leaves the connection of an HTTP error to the garbage collector
    cache = bare_machine / "fashion_mnist"
    assert message.startswith(
        f"the files of data=fashion_mnist are missing and the download into {cache} failed ("
    )
    assert (
        "): set data.root to a folder with the four IDX files, install Debian's"
        " dataset-fashion-mnist" in message
    )
    assert reason in message
    assert len(message.splitlines()) == 1
    assert [path.name for path in bare_machine.iterdir()] == ["fashion_mnist.lock"], (
        "half a download was left"
    )
    assert socket.getdefaulttimeout() is None


# --- synthetic ----------------------------------------------------------------------------------


def synthetic(**options: Any) -> SyntheticConfig:
    return SyntheticConfig(
        **{"mean": [0.5] * 2, "std": [0.5] * 2, "channels": 2, "height": 5, "width": 7} | options
    )


def test_synthetic_images_have_any_shape_and_are_a_function_of_the_seed() -> None:
    one, again, other = (
        build_resident(synthetic(num_train=12, num_eval=3, num_classes=4, seed=seed))
        for seed in (1, 1, 2)
    )
    assert (one.train.images.shape, one.eval.images.shape) == ((12, 2, 5, 7), (3, 2, 5, 7))
    assert one.train.images.dtype == torch.uint8
    assert int(one.train.labels.max()) < 4
    assert torch.equal(one.train.images, again.train.images)
    assert torch.equal(one.train.labels, again.train.labels)
    assert not torch.equal(one.train.images, other.train.images)


def test_synthetic_images_of_a_class_are_alike() -> None:
    splits = build_resident(synthetic(num_train=200, num_eval=100, num_classes=3))
    centres = torch.stack(
        [splits.train.images[splits.train.labels == c].float().mean(0) for c in range(3)]
    )
    distances = torch.cdist(splits.eval.images.float().flatten(1), centres.flatten(1))
    assert torch.equal(distances.argmin(1), splits.eval.labels)
