"""Decoding of pictures of every kind, and the parts of images that training and evaluation see."""

import io
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddp_trainer.data.images import decoding
from ddp_trainer.data.images.decoding import (
    BadImageError,
    Box,
    center_box,
    decode,
    random_box,
    resize,
)
from ddp_trainer.data.images.file_index import load_index
from ddp_trainer.tools.classifier import read_file


def gradient(height: int = 24, width: int = 36) -> np.ndarray:
    """Return a smooth image: red grows downwards, green to the right, blue is 100. uint8
    [H, W, 3].
    """
    red = np.linspace(0, 250, height)[:, None].repeat(width, 1)
    green = np.linspace(0, 250, width)[None].repeat(height, 0)
    return np.stack([red, green, np.full((height, width), 100.0)], -1).round().astype(np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """Return the PNG of uint8 [H, W] or [H, W, 3]."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def as_array(content: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(content), np.uint8)


def npy(values: np.ndarray) -> np.ndarray:
    file = io.BytesIO()
    np.save(file, values)
    return as_array(file.getvalue())


# --- pictures as they come ----------------------------------------------------------------------

RGB = Image.fromarray(gradient())
SIXTEEN = Image.fromarray(np.asarray(RGB.convert("L")).astype(np.uint16) * 257)
BRIGHT = np.asarray(RGB.convert("L")).astype(np.int32) * 257
THIRTY_TWO = Image.fromarray(np.where(BRIGHT > 40_000, 1_000_000, BRIGHT))  # more than 16 bits
IN_EIGHT = Image.fromarray((np.asarray(THIRTY_TWO) / (2**20 - 1) * 255).round().astype(np.uint8))
PICTURES: dict[str, tuple[Image.Image, dict[str, Any], Image.Image]] = {
    "x.png": (RGB, {}, RGB),
    "progressive.jpg": (RGB, {"progressive": True, "quality": 98}, RGB),
    "grey.jpg": (RGB.convert("L"), {"quality": 98}, RGB.convert("L").convert("RGB")),
    "grey.png": (RGB.convert("L"), {}, RGB.convert("L").convert("RGB")),
    "alpha.png": (RGB.convert("RGBA"), {}, RGB),
    "palette.png": (RGB.quantize(256), {}, RGB.quantize(256).convert("RGB")),
    "palette.gif": (RGB.quantize(256), {}, RGB.quantize(256).convert("RGB")),
    "frames.gif": (
        RGB.quantize(256),
        {"save_all": True, "append_images": [RGB.convert("L").quantize()]},
        RGB.quantize(256).convert("RGB"),
    ),
    "cmyk.jpg": (RGB.convert("CMYK"), {"quality": 98}, RGB),
    "sixteen.png": (SIXTEEN, {}, RGB.convert("L").convert("RGB")),
    "sixteen.tiff": (SIXTEEN, {}, RGB.convert("L").convert("RGB")),
    "thirty_two.tiff": (THIRTY_TWO, {}, IN_EIGHT.convert("RGB")),
    "x.webp": (RGB, {"lossless": True}, RGB),
    "x.avif": (RGB, {"quality": 95}, RGB),
    "x.bmp": (RGB, {}, RGB),
    "x.tif": (RGB, {}, RGB),
    "x.ppm": (RGB, {}, RGB),
    "turned.jpg": (RGB.rotate(90, expand=True), {"exif": {0x0112: 6}, "quality": 98}, RGB),
    "one.png": (RGB.crop((0, 0, 1, 1)), {}, RGB.crop((0, 0, 1, 1))),
}
"""What is written under a name, with which options, and what it looks like."""


def encode(name: str, folder: Path) -> bytes:
    image, options, _ = PICTURES[name]
    if tags := options.get("exif"):
        exif = Image.Exif()
        exif.update(tags)
        options = {**options, "exif": exif}
    image.save(folder / name, **options)
    return (folder / name).read_bytes()


@pytest.mark.parametrize("codec", ["torchcodec", "Pillow"])
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_its_pixels_in_rgb(name: str, codec: str, tmp_path: Path, monkeypatch) -> None:
    if codec == "Pillow":
        monkeypatch.setattr(decoding, "decode_image", None)
    expected = torch.from_numpy(np.array(PICTURES[name][2])).permute(2, 0, 1)
    image = decode(as_array(encode(name, tmp_path)))
    assert (image.dtype, image.shape) == (torch.uint8, expected.shape)
    assert (image.int() - expected.int()).abs().float().mean() < 4


NO_IMAGES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "text": (b"not an image", "its format is unknown, or it is not an image"),
    "beginning": (b"\xff\xd8\xff\xe0", "its format is unknown, or it is not an image"),
    "truncated": (png(gradient())[:-60], ""),
    "a bomb": (
        png(np.zeros((10_001, 10_000), np.uint8)),
        "it has 10000 × 10001 pixels, and the maximum is 100 million",
    ),
    "an array as a bomb": (
        npy(np.zeros((3, 1, 60_000_000), np.uint8))[:200].tobytes(),
        "it has 60000000 × 3 pixels, and the maximum is 100 million",
    ),
}
"""What is no image, and how its error begins."""


@pytest.mark.parametrize("codec", ["torchcodec", "Pillow"])
@pytest.mark.parametrize("name", NO_IMAGES)
def test_what_is_no_image_is_a_bad_image(
    name: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if codec == "Pillow":
        monkeypatch.setattr(decoding, "decode_image", None)
    content, reason = NO_IMAGES[name]
    with pytest.raises(BadImageError) as error:
        decode(as_array(content))
    assert reason in str(error.value)
    assert len(str(error.value)) <= 300
    assert str(error.value).isprintable()


def test_a_file_larger_than_memory_is_a_bad_image(tmp_path: Path) -> None:
    """Its end is a hole."""
    huge = tmp_path / "huge.png"
    huge.write_bytes(png(gradient()))
    os.truncate(huge, 2**40)
    with pytest.raises(BadImageError, match="it has 1,099,511,627,776 bytes, and the max"):
        read_file(huge)
    folder = tmp_path / "class"
    folder.mkdir()
    huge.rename(folder / "huge.png")
    with pytest.raises(BadImageError, match="the maximum is 1,"):
        load_index(tmp_path, tmp_path / "cache").read(0)


def test_a_pipe_in_place_of_an_image_is_a_bad_image(tmp_path: Path) -> None:
    """Without a writer, it would be waited for without end."""
    folder = tmp_path / "class"
    folder.mkdir()
    (folder / "1.png").write_bytes(png(gradient()))
    index = load_index(tmp_path, tmp_path / "cache")
    (folder / "1.png").unlink()
    os.mkfifo(folder / "1.png")
    with pytest.raises(BadImageError, match="it is not a regular file"):
        index.read(0)


# --- parts of images ----------------------------------------------------------------------------


def test_a_random_part_is_as_large_as_configured_and_inside_the_image() -> None:
    draws = torch.rand(2000, 4, generator=torch.Generator().manual_seed(0))
    boxes = [random_box(300, 400, row, 0.25) for row in draws.tolist()]
    assert all(0 <= b.top <= 300 - b.height and 0 <= b.left <= 400 - b.width for b in boxes)
    areas = torch.tensor([b.height * b.width / 120_000 for b in boxes])
    assert 0.24 < areas.min() < 0.27
    assert areas.median() == pytest.approx(0.62, abs=0.03)
    aspects = torch.tensor([b.width / b.height for b in boxes])
    assert 0.74 < aspects.min() < 0.78
    assert 1.3 < aspects.max() < 1.34
    assert random_box(1, 1, draws[0].tolist(), 0.25) == Box(0, 0, 1, 1)


def test_a_part_is_scaled_as_pillow_does() -> None:
    image = torch.from_numpy(gradient(60, 90)).permute(2, 0, 1)
    box = center_box(60, 90)
    assert box == Box(4, 19, 52, 52)
    left_top = (box.left, box.top, box.left + box.width, box.top + box.height)
    expected = Image.fromarray(gradient(60, 90)).resize(
        (16, 16), Image.Resampling.BILINEAR, box=left_top
    )
    scaled = resize(image, box, (16, 16)).permute(1, 2, 0).numpy()
    assert np.abs(scaled.astype(int) - np.asarray(expected).astype(int)).max() <= 1


# --- more than 8 bits, and other channels than RGB ----------------------------------------------

TWELVE_BITS = np.asarray(RGB.convert("L")).astype(np.uint16) * 16  # of a scanner or a microscope


@pytest.mark.parametrize("codec", ["torchcodec", "Pillow"])
@pytest.mark.parametrize("name", ["x.png", "x.tiff"])
def test_sixteen_bits_keep_their_contrast(
    name: str, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if codec == "Pillow":
        monkeypatch.setattr(decoding, "decode_image", None)
    Image.fromarray(TWELVE_BITS).save(tmp_path / name)
    image = decode(as_array((tmp_path / name).read_bytes()))
    expected = np.round(TWELVE_BITS / 4095 * 255)
    assert np.abs(image.numpy().astype(int) - expected).max() <= 1
    assert image.max() > 200


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("channels", [1, 3, 4, 7])
@pytest.mark.parametrize("is_last", [False, True])
def test_arrays_have_any_number_of_channels(channels: int, dtype: str, is_last: bool) -> None:
    values = np.random.default_rng(0).integers(0, 256, (channels, 9, 8))
    values[:, 0, :2] = [0, 255]  # so that the range is that of 8 bits
    scaled = (values * {"uint8": 1, "uint16": 257, "float32": 100}[dtype]).astype(dtype)
    image = decode(npy(np.moveaxis(scaled, 0, 2) if is_last else scaled), channels)
    assert torch.equal(image, torch.from_numpy(values).to(torch.uint8))


def false_header(shape: tuple[int, ...]) -> np.ndarray:
    """Return a file of numpy.save whose header has another shape than its 100 bytes."""
    file = io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return as_array(file.getvalue() + bytes(100))


@pytest.mark.parametrize("shape", [(4, 500_000, 2_000_000), (3, -1, 4), (3, 10**30, 10**30)])
def test_a_false_header_allocates_nothing(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadImageError):
        decode(false_header(shape), 4)


def test_only_as_many_pages_as_channels_are_decoded(tmp_path: Path) -> None:
    pages = [Image.new("L", (2000, 2000), number) for number in range(60)]
    pages[0].save(tmp_path / "x.tiff", save_all=True, append_images=pages[1:], compression="lzma")
    began = time.process_time()
    with pytest.raises(BadImageError, match=r"it has more than 4 pages, and data\.channels=4"):
        decode(as_array((tmp_path / "x.tiff").read_bytes()), 4)
    assert time.process_time() - began < 3


def test_the_pages_of_a_tiff_are_channels(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (5, 9, 8), dtype=np.uint8)
    first, *others = [Image.fromarray(page) for page in values]
    first.save(tmp_path / "x.tiff", save_all=True, append_images=others)
    image = decode(as_array((tmp_path / "x.tiff").read_bytes()), 5)
    assert torch.equal(image, torch.from_numpy(values))
    rgba = Image.fromarray(np.moveaxis(values[:4], 0, 2))
    rgba.save(tmp_path / "x.png")
    image = decode(as_array((tmp_path / "x.png").read_bytes()), 4)
    assert torch.equal(image, torch.from_numpy(values[:4]))


def test_gray_is_the_luminance(tmp_path: Path) -> None:
    RGB.save(tmp_path / "x.png")
    image = decode(as_array((tmp_path / "x.png").read_bytes()), 1)
    expected = torch.from_numpy(np.asarray(RGB.convert("L")).astype(int))
    assert image.shape == (1, *expected.shape)
    assert (image[0].int() - expected).abs().max() <= 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (npy(np.zeros((3, 4, 4, 4))), "it is an array of float64 [3, 4, 4, 4], and no image"),
        (npy(np.array([["a"]])), "it is an array of <U1 [1, 1], and no image"),
        (npy(np.full((3, 4, 4), np.nan)), "it has values that are not finite"),
        (npy(np.zeros((2, 4, 4), np.uint8)), "it is an array of shape [2, 4, 4], and the model "),
        (npy(np.zeros((3, 4, 4), np.uint8))[:-5], "ValueError: "),
        (npy(np.array([{}], dtype=object)), "it is an array of object [1], and no image"),
    ],
)
def test_an_array_that_is_no_image_is_a_bad_image(content: np.ndarray, reason: str) -> None:
    with pytest.raises(BadImageError) as raised:
        decode(content)
    assert str(raised.value).startswith(reason)


def test_signed_and_deep_pictures_are_scaled_as_their_arrays(tmp_path: Path) -> None:
    for low, high in ((-1024, 3071), (0, 1_000_000), (0, 65535), (0, 200)):
        values = np.linspace(low, high, 63).round().astype(np.int32).reshape(7, 9)
        Image.fromarray(values).save(tmp_path / "x.tiff")
        image = decode(as_array((tmp_path / "x.tiff").read_bytes()))
        assert torch.equal(image, decode(npy(values)))
        assert image.max() - image.min() >= 200


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        ("float16", 1e-7),
        ("float16", 1e-4),
        ("float16", 65504.0),
        ("float32", 3e38),
        ("float64", 1e-310),
    ],
)
def test_small_and_large_floats_keep_their_contrast(dtype: str, limit: float) -> None:
    values = np.array([[-limit, 0, limit / 2, limit]], dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = decode(npy(values), 1)
    exact = values.astype(np.float64)
    share = (exact - exact.min()) / (exact.max() - exact.min())
    assert np.array_equal(image[0].numpy(), np.round(share * 255))


def saved(image: Image.Image, file_format: str, **options: Any) -> np.ndarray:
    """Return the content of a file of `image`."""
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return as_array(file.getvalue())


def test_pages_of_one_bit_are_black_and_white() -> None:
    bits = np.eye(6, 8) > 0
    pages = [Image.fromarray(bits), Image.fromarray(~bits)]
    image = decode(saved(pages[0], "TIFF", save_all=True, append_images=pages[1:]), 2)
    assert torch.equal(image, torch.from_numpy(np.where([bits, ~bits], 255, 0)))


COLORS = RGB.quantize(16)
CLEAR = Image.merge("RGBA", (*RGB.split(), RGB.getchannel("R").point(lambda value: 200)))
GRAY_ALPHA = Image.merge("LA", (RGB.convert("L"), RGB.getchannel("G")))


@pytest.mark.parametrize(
    ("image", "file_format", "options"),
    [
        (COLORS, "PNG", {}),
        (COLORS, "PNG", {"transparency": 3}),
        (COLORS, "GIF", {}),
        (COLORS, "GIF", {"save_all": True, "append_images": [RGB.convert("L")]}),
        (COLORS, "TIFF", {}),
        (COLORS.convert("PA"), "TIFF", {}),
        (GRAY_ALPHA, "PNG", {}),
    ],
)
def test_palettes_and_gray_with_alpha_become_rgba(
    image: Image.Image, file_format: str, options: dict[str, Any]
) -> None:
    content = saved(image, file_format, **options)
    expected = np.array(Image.open(io.BytesIO(content.data)).convert("RGBA"))
    assert torch.equal(decode(content, 4), torch.from_numpy(expected).permute(2, 0, 1))
    with pytest.raises(BadImageError, match="channels, and the model expects 5"):
        decode(content, 5)


@pytest.mark.parametrize("page", [COLORS, RGB, GRAY_ALPHA])
def test_a_page_in_color_is_no_channel(page: Image.Image) -> None:
    with pytest.raises(BadImageError, match="it has several pages, and one has several channels"):
        decode(saved(page, "TIFF", save_all=True, append_images=[RGB.convert("L")]), 2)


@pytest.mark.parametrize(
    ("mode", "file_format", "options"),
    [
        ("RGBA", "PNG", {}),
        ("P", "PNG", {}),
        ("RGBA", "WEBP", {"lossless": True}),
        ("RGBA", "AVIF", {"quality": 100}),
        ("CMYK", "JPEG", {"quality": 100}),
        ("RGBA", "TIFF", {}),
    ],
)
def test_other_channels_than_rgb_are_turned_too(
    mode: str, file_format: str, options: dict[str, Any]
) -> None:
    image = CLEAR.convert(mode)
    exif = Image.Exif()
    exif[0x0112] = 6
    turn = {"tiffinfo": {274: 6}} if file_format == "TIFF" else {"exif": exif}
    content = saved(image.rotate(90, expand=True), file_format, **options, **turn)
    expected = np.array(image if mode == "CMYK" else image.convert("RGBA")).astype(int)
    turned = decode(content, 4).permute(1, 2, 0).numpy()
    assert turned.shape == expected.shape
    assert np.abs(turned - expected).mean() < 4


@pytest.mark.parametrize("shape", [(32, 24, 1), (32, 24, 4)])
def test_an_array_of_other_channels_is_named_by_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadImageError) as raised:
        decode(npy(np.zeros(shape, np.uint8)))
    assert str(raised.value) == (
        f"it is an array of shape {list(shape)}, and the model expects [3, H, W] or [H, W, 3]:"
        " convert the array"
    )
