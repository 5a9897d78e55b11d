"""The formats of a table's cells: styles of numbers, forms of dates, and numbers as words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, time

from drivetrain.core.lazy import arrow_compute as pc
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import pyarrow as pa
from drivetrain.data.cells import Cells, Words, numbers_of, with_nan

PARTS = ("year", "month", "day", "weekday", "hour")  # of a date; Monday is 0
DATES = "dates are read as 2024-01-31, 31.01.2024, 31/01/2024, 01/31/2024 and 2024/01/31, each with a time or without"
FORMS = ("%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%Y/%m/%d")  # of dates, in addition to ISO's
ISO = re.compile(r"(?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?)?")  # without a time zone
UNIT = "[$€£¥₹₽₩₺%]|USD|EUR|GBP|CHF|JPY|INR|CNY|[kcm]?m[²³]?|ft[²³]?|sqm|sqft|mi|[km]?g|lbs?|[m]?l|min|h|k?Wh?|°[CF]?"
SPACES = "\u00a0\u202f"  # spaces within a number, as in 1 234
EXACT = 2**53  # whole numbers beyond it are not distinct as floats


@dataclass(frozen=True)
class Style:
    """The style in which the numbers of a column are written."""

    decimal: str = "."
    thousands: str = ""
    unit: str = ""

    def numbers(self, words: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of words, NaN for words of another style; and which are of this style, bool."""
        if self == PLAIN:
            try:
                return with_nan(words.cast(pa.float64())), np.ones(len(words), bool)
            except pa.ArrowInvalid:
                pass
        words = self._bare(words)
        whole = rf"(\d+|\d{{1,3}}([{self.thousands}]\d{{3}})+)" if self.thousands else r"\d+"
        right = pc.match_substring_regex(words, rf"^[-+]?({whole}([{self.decimal}]\d*)?|[{self.decimal}]\d+)([eE][-+]?\d+)?$")
        plain = words.filter(right)
        if self.thousands:
            plain = pc.replace_substring(plain, self.thousands, "")
        values, which = np.full(len(words), np.nan), numbers_of(right)
        values[which] = with_nan(pc.replace_substring(plain, self.decimal, ".").cast(pa.float64()))
        return values, which

    def is_of(self, words: pa.StringArray) -> bool:
        """True if all words are numbers of this style and use its marks."""
        mark = self.thousands or self.decimal.replace(".", "")
        return bool(numbers_of(pc.match_substring(self._bare(words), mark)).any() and self.numbers(words)[1].all())

    def _bare(self, words: pa.StringArray) -> pa.StringArray:
        """Return words without the unit, with plain spaces and signs."""
        words = pc.replace_substring(pc.replace_substring_regex(words, f"[{SPACES}]", " "), "−", "-")
        unit = re.escape(self.unit)
        return pc.replace_substring_regex(words, rf"^([-+]?)\s*{unit}\s*|\s*{unit}$", r"\1") if unit else words


PLAIN = Style()
PLAIN_MARKS = asdict(PLAIN)
STYLES = [(decimal, thousands) for decimal in ".," for thousands in ("", ",", ".", " ", "'") if decimal != thousands]


def as_text(number: float) -> str:
    """Return a number as the name of a class or category: whole ones without a decimal point."""
    return str(int(number)) if number.is_integer() else str(number)


def words_of(values: np.ndarray | Words, known: Sequence[str] = ()) -> Words:
    """Return a column's values as words. A number that is known by another text, such as 007, keeps that text."""
    if isinstance(values, Words):
        return values
    numbers, codes = np.unique(values, return_inverse=True)
    texts: dict[float, list[str]] = {}
    for text in known:
        with contextlib.suppress(ValueError):
            texts.setdefault(float(text), []).append(text)
    words = [texts[n][0] if len(texts.get(n, ())) == 1 else as_text(n) for n in numbers[~np.isnan(numbers)].tolist()]
    return Words(np.where(np.isnan(values), -1, codes).astype(np.int32), words)


def styles_of(words: pa.StringArray, codes_too: bool) -> list[Style]:
    """Return the styles in which all words are numbers; styles with the same numbers count once.

    Whole numbers with a leading zero, or too large for a float, are codes.
    """
    numbers, right = PLAIN.numbers(words)
    found = [(PLAIN, numbers)] if right.all() else []
    are_whole = bool(found) and not codes_too and numbers_of(pc.match_substring_regex(words, r"^[-+]?\d+$")).all()
    if are_whole and (numbers_of(pc.match_substring_regex(words, r"^[-+]?0\d")).any() or (np.abs(numbers) >= EXACT).any()):
        return []
    if found and not numbers_of(pc.match_substring_regex(words, r"^[-+]?\d{1,3}([.]\d{3})+$")).all():
        return [PLAIN]  # no other style reads these
    marks = pc.replace_substring_regex(words, rf"^[-+−]|[eE][-+]?\d+$|[\d.,'\s{SPACES}]", "")
    units = pc.replace_substring(marks, "-", "").dictionary_encode().dictionary.to_pylist()
    if len(units) == 1 and re.fullmatch(f"({UNIT})?", units[0]):
        for style in (Style(*marks, units[0]) for marks in STYLES):
            if style != PLAIN and style.is_of(words):
                numbers = style.numbers(words)[0]
                found += [] if any(np.array_equal(numbers, others) for _, others in found) else [(style, numbers)]
    return [style for style, _ in found]


def decimal_of(cells: Cells, styles: Mapping[str, Sequence[Style]]) -> str | None:
    """Return the decimal mark of the unambiguous columns; None where they have none, or both."""
    found = {"." for values in cells.columns.values() if not isinstance(values, Words)}
    for name, fitting in styles.items():
        words = cells.columns[name]
        if len(fitting) == 1 and isinstance(words, Words):
            marked = numbers_of(pc.match_substring(words.words, fitting[0].decimal)).any() or fitting[0].thousands in (".", ",")
            found |= {fitting[0].decimal} if marked else set()
    return found.pop() if len(found) == 1 else None


def date_form(words: Words) -> list[str | int] | None:
    """Return the one form in which all words are dates, and how many parts they have; None where there is none."""
    if not numbers_of(pc.match_substring_regex(words.words, r"^\d{1,4}[-./]\d{1,2}[-./]\d{1,4}([T ]\d[\d:.+-]+Z?)?$")).all():
        return None
    forms = [
        form
        for form in ("", *FORMS)
        if read_dates(words.texts[:1], form, 4)[1].all() and read_dates(words.texts, form, 4)[1].all()
    ]
    times = len(forms) == 1 and bool((read_dates(words.texts, forms[0], 5)[0][:, 4] != 0).any())
    return [forms[0], 4 + times] if len(forms) == 1 else None


def read_dates(texts: Sequence[str], form: str, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts (n, parts) of dates, NaN for texts of another form; and which are of this form, bool."""
    found = np.full((len(texts), parts), np.nan)
    if not form and all(map(ISO.fullmatch, texts)):
        with contextlib.suppress(ValueError):  # as NumPy reads them all at once
            at_once = np.array(texts, "datetime64[us]")
            days, months = at_once.astype("datetime64[D]"), at_once.astype("datetime64[M]").astype(int)
            day, minutes = days.astype(int), (at_once - days).astype("timedelta64[m]").astype(int)
            of_month = day - months.astype("datetime64[M]").astype("datetime64[D]").astype(int)
            whole = (months // 12 + 1970, months % 12 + 1, of_month + 1, (day + 3) % 7, minutes // 60 + minutes % 60 / 60)
            return np.stack(whole[:parts], 1).astype(float), np.ones(len(texts), bool)
    for n, text in enumerate(texts):
        with contextlib.suppress(ValueError):
            date, _, clock = text.replace("T", " ").partition(" ")  # for other forms the time is read separately
            at = datetime.strptime(date, form) if form else datetime.fromisoformat(text)
            at = datetime.combine(at, time.fromisoformat(clock)) if form and clock else at
            found[n] = (at.year, at.month, at.day, at.weekday(), at.hour + at.minute / 60)[:parts]
    return found, ~np.isnan(found[:, 0])
