"""Pictures of scores as PNG files: a confusion matrix, images with text below, and thumbnails."""

import io
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

WHITE = (255, 255, 255)
BLACK = (30, 30, 30)
BLUE = (31, 119, 180)
ORANGE = (214, 96, 20)
MATRIX = 900
LEFT = 170
TOP = 50
"""Pixels: the side of a matrix (more for over 900 classes), and the space for names and numbers."""
MIN_NAMED = 10
MIN_NUMBERED = 26
"""The side of a cell, in pixels, from which a matrix shows class names, and counts in its cells."""
TILE = 128
TILE_HEIGHT = TILE + 38


def png(image: Image.Image) -> bytes:
    """Return `image` as the content of a PNG file."""
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def to_image(pixels: Tensor) -> Image.Image:
    """Return uint8 [C, H, W] as an RGB picture; if C is not 1 or 3, the first channel in gray."""
    shown = pixels if pixels.shape[0] in (1, 3) else pixels[:1]
    return Image.fromarray(shown.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())


def short_ascii(name: str, *, length: int) -> str:
    """Return `name` in ASCII, with escapes, because the font has few other characters, and cut."""
    text = ascii(name)[1:-1]
    return text if len(text) <= length else f"{text[: length - 2]}.."


def confusion_png(confusion: Tensor, class_names: Sequence[str]) -> bytes:
    """Return a PNG of int64 [true, predicted class]; a larger share of its row is darker."""
    size = len(class_names)
    cell = max(1, min(64, MATRIX // size))
    side = cell * size
    picture = Image.new("RGB", (LEFT + max(side, 200) + 20, TOP + max(side, 260) + 20), WHITE)
    cells = shaded(confusion).resize((side, side), Image.Resampling.NEAREST)
    picture.paste(cells, (LEFT, TOP))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((LEFT - 1, TOP - 1, LEFT + side, TOP + side), outline=BLACK)
    draw.text((8, 8), "rows: true class, columns: predicted class", BLACK)
    if cell >= MIN_NAMED:
        font = ImageFont.load_default(min(14, 0.7 * cell))
        for number, name in enumerate(class_names):
            place = number * cell + cell // 2
            label = f"{number}: {short_ascii(name, length=18)}"
            draw.text((LEFT - 6, TOP + place), label, BLACK, font, anchor="rm")
            draw.text((LEFT + place, TOP - 4), str(number), BLACK, font, anchor="mb")
    if cell >= MIN_NUMBERED:
        draw_counts(draw, confusion, cell)
    return png(picture)


def shaded(confusion: Tensor) -> Image.Image:
    """Return int64 [C, C] as a pixel per cell: blue on the diagonal, orange elsewhere."""
    # the root shows small shares
    share = (confusion / confusion.sum(1, keepdim=True).clamp(min=1)).sqrt().numpy()[:, :, None]
    color = np.where(np.eye(len(confusion), dtype=bool)[:, :, None], BLUE, ORANGE)
    return Image.fromarray((255 - share * (255 - color)).round().astype(np.uint8))


def draw_counts(draw: ImageDraw.ImageDraw, confusion: Tensor, cell: int) -> None:
    """Draw the counts of int64 [C, C] into cells of `cell` pixels, without zeros."""
    totals = confusion.sum(1).tolist()
    for row, column in confusion.nonzero().tolist():
        count = int(confusion[row, column])
        font = ImageFont.load_default(min(15, max(7, 1.5 * cell / len(str(count)))))
        center = (LEFT + column * cell + cell // 2, TOP + row * cell + cell // 2)
        color = WHITE if count > totals[row] / 3 else BLACK
        draw.text(center, str(count), color, font, anchor="mm")


def captioned_png(images: Sequence[Tensor], captions: Sequence[tuple[str, str]]) -> bytes:
    """Return a PNG of `images`, uint8 [C, H, W], eight in a row, with two lines of text below."""
    num_rows = math.ceil(len(images) / 8)
    width = min(8, len(images)) * (TILE + 8)
    picture = Image.new("RGB", (width, num_rows * TILE_HEIGHT), WHITE)
    draw = ImageDraw.Draw(picture)
    for number, (pixels, (first, second)) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(number, 8)
        left = column * (TILE + 8) + 4
        top = row * TILE_HEIGHT + 4
        image = to_image(pixels)
        is_small = max(image.size) <= TILE // 2
        smoothing = Image.Resampling.NEAREST if is_small else Image.Resampling.BILINEAR
        picture.paste(ImageOps.contain(image, (TILE, TILE), smoothing), (left, top))
        draw.text((left, top + TILE + 2), short_ascii(first, length=22), ORANGE)
        draw.text((left, top + TILE + 15), short_ascii(second, length=22), BLACK)
    return png(picture)


def thumbnail_png(pixels: Tensor, *, side: int = 96) -> bytes:
    """Return a PNG of an image, uint8 [C, H, W], whose longer side has at most `side` pixels."""
    image = to_image(pixels)
    image.thumbnail((side, side))
    return png(image)
