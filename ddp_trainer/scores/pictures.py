"""Pictures of scores as PNG files: a confusion matrix, images with text below them, and
thumbnails.
"""

import io
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ddp_trainer.config.errors import printable

WHITE = (255, 255, 255)
BLACK = (30, 30, 30)
BLUE = (31, 119, 180)
ORANGE = (214, 96, 20)
MATRIX = 900
MARGIN = 170
TITLE = 40
"""Pixels: the side of a matrix (more for over 900 classes), the margin for class names, the space
below.
"""
MIN_NAMED = 10
MIN_NUMBERED = 26
"""The side of a cell, in pixels, from which the picture of a matrix shows class names, and numbers
in its cells.
"""
Font = ImageFont.ImageFont | ImageFont.FreeTypeFont
TILE = 128
CAPTION = 30


def png(image: Image.Image) -> bytes:
    """Return `image` as the content of a PNG file."""
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def to_image(pixels: Tensor) -> Image.Image:
    """Return `pixels`, uint8 [C, H, W], as an RGB picture; if C is not 1 or 3, the first channel in
    gray.
    """
    shown = pixels if pixels.shape[0] in (1, 3) else pixels[:1]
    return Image.fromarray(shown.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())


def short_ascii(name: str, *, length: int) -> str:
    """Return `name` as ASCII, which the built-in font has, cut to `length` characters."""
    text = printable(name).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= length else f"{text[: length - 2]}.."


def confusion_png(confusion: Tensor, class_names: Sequence[str]) -> bytes:
    """Return a PNG of `confusion`, int64 [true, predicted class]; the larger a cell's share of its
    row, the darker.
    """
    size = len(class_names)
    cell = max(1, min(64, MATRIX // size))
    side = max(cell * size, 240)
    picture = Image.new("RGB", (MARGIN + side + 20, MARGIN + side + TITLE), WHITE)
    picture.paste(
        shaded(confusion).resize((cell * size, cell * size), Image.Resampling.NEAREST),
        (MARGIN, MARGIN),
    )
    draw = ImageDraw.Draw(picture)
    draw.rectangle(
        (MARGIN - 1, MARGIN - 1, MARGIN + cell * size, MARGIN + cell * size), outline=BLACK
    )
    draw.text((8, 8), "predicted class (columns)", BLACK, ImageFont.load_default(14))
    draw.text((8, 28), "true class (rows)", BLACK, ImageFont.load_default(14))
    if cell >= MIN_NAMED:
        font = ImageFont.load_default(min(14, cell))
        for number, name in enumerate(class_names):
            place = MARGIN + number * cell + cell // 2
            draw.text((MARGIN - 6, place), short_ascii(name, length=20), BLACK, font, anchor="rm")
            paste_turned(
                picture, short_ascii(name, length=20), font, bottom=MARGIN - 6, center=place
            )
    if cell >= MIN_NUMBERED:
        draw_counts(draw, confusion, cell)
    return png(picture)


def shaded(confusion: Tensor) -> Image.Image:
    """Return `confusion`, int64 [classes, classes], as one pixel per cell: blue on the diagonal,
    orange elsewhere.
    """
    # shows small shares
    share = (confusion / confusion.sum(1, keepdim=True).clamp(min=1)).sqrt().numpy()[:, :, None]
    color = np.where(np.eye(len(confusion), dtype=bool)[:, :, None], BLUE, ORANGE)
    return Image.fromarray((255 - share * (255 - color)).round().astype(np.uint8))


def draw_counts(draw: ImageDraw.ImageDraw, confusion: Tensor, cell: int) -> None:
    """Draw each count of `confusion`, int64 [classes, classes], into its cell of `cell` pixels; a
    zero is not drawn.
    """
    totals = confusion.sum(1).tolist()
    for row, counts in enumerate(confusion.tolist()):
        for column, count in enumerate(counts):
            if count:
                text = str(count)
                font = ImageFont.load_default(min(15, max(7, int(1.5 * cell / len(text)))))
                center = (MARGIN + column * cell + cell // 2, MARGIN + row * cell + cell // 2)
                draw.text(
                    center, text, WHITE if count > totals[row] / 3 else BLACK, font, anchor="mm"
                )


def paste_turned(picture: Image.Image, text: str, font: Font, *, bottom: int, center: int) -> None:
    """Draw `text` turned to read upwards: its start is at y = `bottom`, its middle at x = `center`,
    in pixels.
    """
    _, top, right, low = font.getbbox(text)
    label = Image.new("RGB", (max(1, math.ceil(right)), max(1, math.ceil(low - top))), WHITE)
    ImageDraw.Draw(label).text((0, -top), text, BLACK, font)
    turned = label.rotate(90, expand=True)
    picture.paste(turned, (center - turned.width // 2, bottom - turned.height))


def captioned_png(images: Sequence[Tensor], captions: Sequence[tuple[str, str]]) -> bytes:
    """Return a PNG of `images`, uint8 [C, H, W] each, eight in a row, with the two lines of its
    caption below each.
    """
    columns = min(8, max(1, len(images)))
    height = TILE + CAPTION + 8
    picture = Image.new(
        "RGB", (columns * (TILE + 8), max(1, math.ceil(len(images) / columns)) * height), WHITE
    )
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(11)
    for number, (pixels, lines) in enumerate(zip(images, captions, strict=True)):
        left = number % columns * (TILE + 8) + 4
        top = number // columns * height + 4
        picture.paste(fitted(to_image(pixels), TILE), (left, top))
        for row, (line, color) in enumerate(zip(lines, (ORANGE, BLACK), strict=True)):
            draw.text((left, top + TILE + 2 + 13 * row), short_ascii(line, length=22), color, font)
    return png(picture)


def fitted(image: Image.Image, side: int) -> Image.Image:
    """Return `image` with its longer side scaled to `side` pixels, without smoothing if it at least
    doubles.
    """
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.BILINEAR)


def thumbnail_png(pixels: Tensor, *, side: int = 96) -> bytes:
    """Return a PNG of an image, uint8 [C, H, W]. If its longer side is above `side` pixels, it is
    scaled down.
    """
    image = to_image(pixels)
    image.thumbnail((side, side))
    return png(image)
