"""Pictures of scores as PNG files: a confusion matrix, images with text below, and thumbnails."""

import io
import math
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

WHITE = (255, 255, 255)
BLACK = (30, 30, 30)
BLUE = (31, 119, 180)
ORANGE = (214, 96, 20)
MATRIX = 900
LEFT = 230
TOP = 50
"""In pixels: the side of a matrix (more for many classes), the space for labels beside it."""
MAX_NAMED = 100
"""With more classes than this, a matrix has no class names."""
MIN_NAMED = 12
MIN_NUMBERED = 26
"""The smallest side of a cell, in pixels, for which class names, or counts in cells, are drawn."""
TILE = 128
TEXT_SIZE = 15
LINE = 19
"""In pixels: the side of an image above its lines of text, and the size and height of a line."""


def png(image: Image.Image) -> bytes:
    """Return `image` as the content of a PNG file."""
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def to_image(pixels: Tensor) -> Image.Image:
    """Return `pixels`, uint8 [C, H, W], as an RGB image; if C is not 1 or 3, channel 0 in gray."""
    rgb = pixels if pixels.shape[0] == 3 else pixels[:1].expand(3, -1, -1)
    return Image.fromarray(rgb.movedim(0, -1).numpy(force=True))


@cache
def load_font(size: float) -> Font:
    """Return DejaVu Sans, from the system or from matplotlib, or else Pillow's font of ASCII."""
    package = find_spec("matplotlib")
    folders = (package and package.submodule_search_locations) or []
    for folder in ("", *(f"{folder}/mpl-data/fonts/ttf/" for folder in folders)):
        with suppress(OSError):
            return ImageFont.truetype(f"{folder}DejaVuSans.ttf", size)
    return ImageFont.load_default(size)


def drawable(name: str, font: Any) -> str:
    """Return `name` with only characters of `font`; others lose their accents, or are escaped."""
    missing = bytes(font.getmask("\uffff"))

    def shown(character: str) -> str:
        if character.isprintable() and bytes(font.getmask(character)) != missing:
            return character
        parts = unicodedata.normalize("NFKD", character)
        return ascii("".join(part for part in parts if not unicodedata.combining(part)))[1:-1]

    return "".join(map(shown, unicodedata.normalize("NFC", name)))


def fitting(name: str, font: Font, width: int) -> str:
    """Return `name` as `drawable` does, shortened until it is at most `width` pixels wide."""
    text = drawable(name[:100], font)
    shown = text
    while font.getlength(shown) > width:
        text = text[:-1]
        shown = f"{text}…"
    return shown


def confusion_png(confusion: Tensor, class_names: Sequence[str]) -> bytes:
    """Return a PNG of `confusion`, int64 [true, predicted]; larger shares of a row are darker."""
    size = len(class_names)
    cell = max(MIN_NAMED if size <= MAX_NAMED else 1, min(64, MATRIX // size))
    side = cell * size
    picture = Image.new("RGB", (LEFT + max(side, 200) + 20, TOP + max(side, 260) + 20), WHITE)
    cells = shaded(confusion).resize((side, side), Image.Resampling.NEAREST)
    picture.paste(cells, (LEFT, TOP))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((LEFT - 1, TOP - 1, LEFT + side, TOP + side), outline=BLACK)
    caption = "rows: true class, columns: predicted class"
    draw.text((8, 6), caption, BLACK, load_font(TEXT_SIZE))
    if cell >= MIN_NAMED:
        font = load_font(min(14, 0.8 * cell))
        for number, name in enumerate(class_names):
            place = number * cell + cell // 2
            label = fitting(f"{number}: {name}", font, LEFT - 12)
            draw.text((LEFT - 6, TOP + place), label, BLACK, font, anchor="rm")
            if cell >= MIN_NUMBERED or number % 5 == 0:  # because numbers must not touch
                draw.text((LEFT + place, TOP - 4), str(number), BLACK, font, anchor="mb")
    if cell >= MIN_NUMBERED:
        draw_counts(draw, confusion, cell)
    return png(picture)


def shaded(confusion: Tensor) -> Image.Image:
    """Return an image of `confusion`, [C, C], a pixel a cell: blue on the diagonal, else orange."""
    # the square root makes small shares visible
    share = (confusion / confusion.sum(1, keepdim=True).clamp(min=1)).sqrt().numpy()[:, :, None]
    color = np.where(np.eye(len(confusion), dtype=bool)[:, :, None], BLUE, ORANGE)
    return Image.fromarray((255 - share * (255 - color)).round().astype(np.uint8))


def draw_counts(draw: ImageDraw.ImageDraw, confusion: Tensor, cell: int) -> None:
    """Draw the counts of `confusion`, int64 [C, C], except 0, into cells of side `cell` pixels."""
    totals = confusion.sum(1).tolist()
    for row, column in confusion.nonzero().tolist():
        count = int(confusion[row, column])
        font = load_font(min(15, max(7, 1.5 * cell / len(str(count)))))
        center = (LEFT + column * cell + cell // 2, TOP + row * cell + cell // 2)
        color = WHITE if count > totals[row] / 3 else BLACK
        draw.text(center, str(count), color, font, anchor="mm")


def captioned_png(images: Sequence[Tensor], captions: Sequence[Sequence[str]]) -> bytes:
    """Return a PNG of `images`, uint8 [C, H, W], eight in a row, each above its lines of text."""
    font = load_font(TEXT_SIZE)
    height = TILE + 12 + LINE * max(map(len, captions))
    width = TILE + 8
    in_row = min(8, len(images))
    sheet = Image.new("RGB", (width * in_row, height * math.ceil(len(images) / in_row)), WHITE)
    draw = ImageDraw.Draw(sheet)
    for number, (pixels, lines) in enumerate(zip(images, captions, strict=True)):
        left = width * (number % in_row)
        top = height * (number // in_row)
        image = to_image(pixels)
        is_small = max(image.size) <= TILE // 2
        smoothing = Image.Resampling.NEAREST if is_small else Image.Resampling.BILINEAR
        sheet.paste(ImageOps.contain(image, (TILE, TILE), smoothing), (left + 4, top + 4))
        for line_number, line in enumerate(lines):
            place = (left + 4, top + TILE + 6 + line_number * LINE)
            draw.text(place, fitting(line, font, TILE), BLACK, font)
    return png(sheet)


def thumbnail_png(pixels: Tensor, *, side: int = 96) -> bytes:
    """Return a PNG of `pixels`, uint8 [C, H, W], shrunk until no side exceeds `side` pixels."""
    image = to_image(pixels)
    image.thumbnail((side, side))
    return png(image)
