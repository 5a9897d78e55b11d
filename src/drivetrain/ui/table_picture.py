"""A confusion matrix as a PNG, for loggers that take pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core import files

if TYPE_CHECKING:
    from PIL import ImageDraw

SIDE = 900  # pixels that the cells of a large matrix share
CELL = (4, 44)  # pixels of a cell, at least and at most
NUMBERED = 20  # pixels of a cell that a number and a name fit beside
COLOR = (62, 99, 221)
INK = (28, 32, 36)


def draw(table: Mapping[str, Any], path: Path) -> Path:
    """Draw a confusion matrix: colours are shares of the class (a row), numbers are counts. Returns `path`."""
    from PIL import Image, ImageDraw, ImageFont

    names, counts = table["rows"], table["values"]
    cell = min(CELL[1], max(CELL[0], SIDE // len(names)))
    font = ImageFont.load_default(11)
    named = cell >= NUMBERED
    margin = 24 + (min(160, max(int(font.getlength(name)) for name in names)) if named else 0)
    side = margin + cell * len(names) + 8
    sheet = Image.new("RGB", (side, side), "white")
    pen = ImageDraw.Draw(sheet)
    for row, line in enumerate(counts):
        for column, count in enumerate(line):
            left, top = margin + column * cell, margin + row * cell
            share = count / max(sum(line), 1)
            shade = tuple(round(255 + (c - 255) * share) for c in COLOR)
            pen.rectangle((left, top, left + cell - 1, top + cell - 1), fill=shade, outline=(217, 217, 224) if named else None)
            if named and count:
                text = f"{count}" if count < 10_000 else f"{count / 1000:.0f}k"
                pen.text((left + cell / 2, top + cell / 2), text, "white" if share > 0.5 else INK, font, "mm")
    if named:
        _names(pen, sheet, names, margin, cell, font)
    pen.text((margin + cell * len(names) / 2, 10), "predicted", INK, font, "mm")
    _turned(sheet, "class", (4, margin + cell * len(names) // 2), font)
    sheet.save(files.place_for(path))
    return path


def _names(pen: ImageDraw.ImageDraw, sheet: Any, names: list[str], margin: int, cell: int, font: Any) -> None:
    for n, name in enumerate(names):
        middle = margin + n * cell + cell // 2
        pen.text((margin - 4, middle), name, INK, font, "rm")
        _turned(sheet, name, (middle - 7, margin - 4), font)


def _turned(sheet: Any, text: str, place: tuple[int, int], font: Any) -> None:
    """Write a text from the bottom to the top; `place` is the left end of its lines, and where it begins."""
    from PIL import Image, ImageDraw

    strip = Image.new("RGB", (int(font.getlength(text)) + 1, 14), "white")
    ImageDraw.Draw(strip).text((0, 0), text, INK, font)
    turned = strip.rotate(90, expand=True)
    sheet.paste(turned, (place[0], max(0, place[1] - turned.height)))
