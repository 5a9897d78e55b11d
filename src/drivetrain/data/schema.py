"""The schema of a table: how its columns become inputs and targets. It is decided once, on the training file, and kept."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date, datetime
from typing import Any, Literal, Self, get_args

from drivetrain.core.errors import DataError, UserError, did_you_mean
from drivetrain.core.lazy import arrow_compute as pc
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import pyarrow as pa
from drivetrain.core.lazy import torch
from drivetrain.core.machine.files import parse_json
from drivetrain.core.step.source import Source
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.core.typed import fits
from drivetrain.data.base import Splits, Units
from drivetrain.data.tables import MISSING, NO_NAME, Cells, Words, absent, is_number, numbers_of, with_nan
from drivetrain.data.untrusted import number_of_classes

PARTS = ("year", "month", "day", "weekday", "hour")  # of a date; Monday is 0
FORMS = ("%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%Y/%m/%d")  # of dates, beside ISO's
UNIT = "[$€£¥₹₽₩₺%]|USD|EUR|GBP|CHF|JPY|INR|CNY"
SPACES = "\u00a0\u202f"  # that do not end a line, as in 1 234
EXACT = 2**53  # whole numbers beyond it are not told apart as floats


@dataclass(frozen=True)
class Style:
    """The style in which the numbers of a column are written."""

    decimal: str = "."
    thousands: str = ""
    unit: str = ""

    def numbers(self, words: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers that words stand for, NaN for those that are not of this style; and which are, bool."""
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
        """True if all words are numbers of this style, and its marks are among them."""
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


def mean_and_std(values: np.ndarray) -> tuple[float, float]:
    """Return the mean and the deviation of numbers; 1 where they are all alike but for rounding, as scikit-learn has it."""
    if not len(values):
        return 0.0, 1.0
    mean, variance, eps = float(values.mean()), float(values.var()), 2.0**-52
    alike = variance <= len(values) * eps * variance + (len(values) * mean * eps) ** 2
    return mean, 1.0 if alike else math.sqrt(variance)


def as_text(number: float) -> str:
    """Return a number as the name of a class or category: whole ones without a decimal point, as texts have them."""
    return str(int(number)) if number.is_integer() else str(number)


def words_of(values: np.ndarray | Words, known: Sequence[str] = ()) -> Words:
    """Return a column's values as words. A number that is known by another text of its own, such as 007, has that one."""
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
    """Return the styles in which all words are numbers, of those that give the same numbers one.

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
    """Return the decimal mark that the columns have which can be read in one way; None where they have none, or both."""
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
    times = not any(forms) and bool((read_dates(words.texts, "", 5)[0][:, 4] != 0).any())
    return [forms[0], 4 + times] if len(forms) == 1 else None


def read_dates(texts: Sequence[str], form: str, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts (n, parts) of dates, NaN for texts that are none of this form; and which are, bool."""
    found = np.full((len(texts), parts), np.nan)
    for n, text in enumerate(texts):
        with contextlib.suppress(ValueError):
            at = datetime.strptime(text, form) if form else datetime.fromisoformat(text)
            found[n] = (at.year, at.month, at.day, at.weekday(), at.hour + at.minute / 60)[:parts]
    return found, ~np.isnan(found[:, 0])


ColumnType = Literal["number", "category", "date", "text"]
TYPES = (*get_args(ColumnType), "unused")  # that the user may give
MAX_CATEGORIES = 1000  # of one column; more are texts or numbers of rows, not categories
NO_VALUE = "(missing)"  # the category of a missing text
NEARLY_ALL = 0.9
SHOWN, FIRST_ROWS = 3, 100  # values of a column that are named, and rows that give the examples
FEW_ROWS = 20  # of which nothing is said to look wrong
NUMBER = "number"
BOOLEAN = "boolean"


@dataclass
class Column:
    """The column of a table: how it is read, and, where it is an input, how its values are encoded."""

    name: str
    type: ColumnType
    # Of a number: its Style; of a date: the form, and its number of parts; of a category: whether of truths; of a text: the
    # tokens that a model reads of it, at most.
    style: Any = None
    categories: list[str] | None = None
    mean: list[float] = field(default_factory=list)  # also what fills a missing number; of a date one for each part
    std: list[float] = field(default_factory=list)

    def read(self, cells: Cells) -> np.ndarray | Words:
        """Return a column's values: numbers (n,), the parts of dates (n, k), or words. Raises DataError, with its line."""
        values = cells.columns[self.name]
        if self.type in ("category", "text"):
            words = words_of(values, self.categories or ())
            if self.style != BOOLEAN:
                return words
            lower = pc.utf8_lower(words.words).dictionary_encode()
            return Words(np.append(numbers_of(lower.indices), -1)[words.codes], lower.dictionary)
        if not isinstance(values, Words):
            if self.type == "date":
                raise DataError(f"{cells.source}: the column {self.name} holds numbers, and the training rows have dates there")
            return values
        numbers, right = (
            Style(**self.style).numbers(values.words) if self.type == NUMBER else read_dates(values.texts, *self.style)
        )
        if not right.all():
            wrong = int((~right).argmax())
            raise DataError(
                f"{cells.place(int((values.codes == wrong).argmax()))}: the column {self.name} holds {values.texts[wrong]!r}, "
                f"and {'the training rows have' if self.mean else 'it is to hold'} {self.type}s there"
            )
        nothing = np.full((1, *numbers.shape[1:]), np.nan)  # of rows without a word
        return np.asarray(np.concatenate([numbers, nothing])[values.codes])

    def learn(self, values: np.ndarray | Words, normalize: bool) -> None:
        """Find the categories, or mean and deviation, of training rows. Raises UserError."""
        if self.type == "text":
            return
        if isinstance(values, Words):
            present = np.unique(values.codes).tolist()
            self.categories = sorted([NO_VALUE if code < 0 else values.texts[code] for code in present])
            if len(self.categories) > MAX_CATEGORIES:
                raise UserError(
                    f"the column {self.name} has {len(self.categories):,} different texts, and each would become an input: leave "
                    f"it out, as by data.columns={{{self.name}: unused}}"
                )
            return
        each = values.reshape(len(values), -1).T
        scales = [mean_and_std(part[~np.isnan(part)]) for part in each] if normalize else [(0.0, 1.0)] * len(each)
        self.mean, self.std = [mean for mean, _ in scales], [std for _, std in scales]

    def encode(self, values: np.ndarray | Words, into: np.ndarray) -> None:
        """Write the inputs (n, outputs) into zeros. A category that no training row has stays all zeros."""
        if isinstance(values, Words):
            codes = self._codes(values)
            rows = np.flatnonzero(codes < self.outputs)
            into[rows, codes[rows]] = 1
            return
        values = values.reshape(len(values), -1)
        into[:] = (np.where(np.isnan(values), self.mean, values) - self.mean) / self.std

    def unknown(self, values: np.ndarray | Words) -> tuple[int, list[str]]:
        """Return how many values are categories that no training row has, and these."""
        if not isinstance(values, Words) or self.type == "text":
            return 0, []
        rows = values.codes[self._codes(values) == self.outputs]
        return len(rows), sorted({NO_VALUE if code < 0 else values.texts[code] for code in rows.tolist()})

    def _codes(self, words: Words) -> np.ndarray:
        code_of = {category: number for number, category in enumerate(self.categories or ())}
        return np.asarray(np.array([code_of.get(text, len(code_of)) for text in (*words.texts, NO_VALUE)])[words.codes])

    @property
    def outputs(self) -> int:
        """The number of inputs of the model that it becomes, at most."""
        if self.type == "text":
            return int(self.style)
        return len(self.mean) if self.categories is None else len(self.categories)

    def kind(self) -> str:
        """Return what it became, in words."""
        if self.type == "category":
            return "a category" if self.categories is None else f"{len(self.categories)} categories"
        if self.type == "text":
            return f"a text of up to {self.style} tokens"
        if self.type == "date":
            return f"a date ({', '.join(PARTS[: self.style[1]])})"
        style = Style(**self.style)
        marks = f"written as 1{style.thousands}234{style.decimal}5{style.unit}"
        return NUMBER if style == PLAIN else f"{NUMBER}, {marks}"


@dataclass
class TableSchema:
    """The columns of a table that can be read, in its order."""

    columns: dict[str, Column]
    missing: tuple[str, ...] = MISSING
    inputs: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # column → why
    doubts: dict[str, str] = field(default_factory=dict)  # column → what looks wrong

    @classmethod
    def decided(
        cls,
        cells: Cells,
        types: Mapping[str, str],
        missing: tuple[str, ...] = MISSING,
        decimal: str | None = None,
        hint: str = "",
        targets: Sequence[str] = (),
    ) -> TableSchema:
        """Return the schema of a training file. `types` are those that the user gives; `hint` is its likelier decimal mark.

        A target is no date. Raises UserError where a number can be read in two ways.
        """
        schema, styles = cls({}, missing), dict[str, list[Style]]()
        for name, values in cells.columns.items():
            wanted = types.get(name, "")
            if why := _why_not(name, values):
                schema.left_out[name] = why
            elif isinstance(values, Words):
                styles[name] = [] if wanted in ("category", "date", "text") else styles_of(values.words, wanted == NUMBER)
        known = decimal or decimal_of(cells, styles) or hint
        for name, values in cells.columns.items():
            if name not in schema.left_out and types.get(name) != "unused":
                found = styles.get(name, [PLAIN])
                if len(found) > 1:
                    found = [style for style in found if style.decimal == known] or [
                        style for style in found if (style.decimal, style.thousands) == STYLES[0]
                    ]
                if styles.get(name) and not found:
                    assert isinstance(values, Words)
                    raise UserError(
                        f"{cells.source}: the column {name} holds numbers such as {values.texts[0]!r}, which can be read in two "
                        "ways: set data.decimal=',' or data.decimal='.'"
                    )
                schema.columns[name] = column = schema._decide(name, values, types.get(name, ""), found, cells)
                if column.type == "date" and name in targets:
                    schema.columns[name] = Column(name, "category")
        return schema

    def _decide(self, name: str, values: np.ndarray | Words, wanted: str, styles: Sequence[Style], cells: Cells) -> Column:
        if wanted in ("category", "text") or (isinstance(values, Words) and not styles and not wanted):
            return self._of_texts(name, values, wanted, cells)
        if wanted == "date":
            form = date_form(values) if isinstance(values, Words) else None
            return Column(name, "date", form or ["", 4])  # which the first wrong cell refuses
        if not styles and isinstance(values, Words):  # so that what does not fit is refused
            styles = [max((Style(*marks) for marks in STYLES), key=lambda style: style.numbers(values.words)[1].sum())]
        return Column(name, "number", asdict(styles[0]))

    def _of_texts(self, name: str, values: np.ndarray | Words, wanted: str, cells: Cells) -> Column:
        if wanted or not isinstance(values, Words):
            return Column(name, "category")
        if {text.lower() for text in values.texts[:3]} <= {"true", "false"}:
            return Column(name, "category", BOOLEAN)
        if (form := date_form(values)) is not None:
            return Column(name, "date", form)
        _, right = PLAIN.numbers(values.words)
        numbers = np.append(right, False)[values.codes].sum() / max(1, (values.codes >= 0).sum())
        if numbers >= NEARLY_ALL and len(values) >= FEW_ROWS and not right.all():
            row = int((values.codes == int((~right).argmax())).argmax())
            self.doubts[name] = (
                f"{cells.place(row)}: the column {name} holds {values.texts[values.codes[row]]!r} among numbers, so that all are "
                f"read as categories: mend it, add it to data.na, or set data.columns={{{name}: number}}"
            )
        elif len(values.words) > NEARLY_ALL * len(values) and len(values) >= FEW_ROWS:
            self.doubts[name] = (
                f"{cells.source}: {len(values.words):,} of {len(values):,} rows have a text of their own in the column {name}, "
                f"such as {values.texts[0]!r}: leave it out by data.columns={{{name}: unused}}, or set model=transformers, which "
                "reads texts"
            )
        return Column(name, "category")

    def read(self, cells: Cells) -> Cells:
        """Return the values of the columns that the cells have. Raises DataError, also for an infinite number."""
        values = {name: column.read(cells) for name, column in self.columns.items() if name in cells.columns}
        for name, found in values.items():
            if not isinstance(found, Words) and np.isinf(found).any():
                row = int(np.isinf(found).reshape(len(found), -1).any(1).argmax())
                raise DataError(f"{cells.place(row)}: the column {name} holds an infinite number: mend it, or add it to data.na")
        return Cells(values, cells.source, cells.lines, cells.numbers)

    def learn(self, rows: Cells, names: Sequence[str], normalize: bool) -> None:
        """Learn how the inputs `names` are encoded, of training rows that `read` gave."""
        self.inputs = list(names)
        for name in names:
            self.columns[name].learn(rows.columns[name], normalize)

    def encode(self, rows: Cells) -> torch.Tensor:
        """Return inputs float32 (n, d) of rows that `read` gave."""
        encoded, first = np.zeros((len(rows), self.outputs), np.float32), 0
        for column in (self.columns[name] for name in self.inputs):
            column.encode(rows.columns[column.name], encoded[:, first : first + column.outputs])
            first += column.outputs
        return torch.from_numpy(encoded)

    @property
    def text(self) -> str | None:
        """The input that is a text, which is then the only one; None where there is none."""
        return next((name for name in self.inputs if self.columns[name].type == "text"), None)

    def read_as_text(self, cells: Cells, types: Mapping[str, str], length: int) -> None:
        """Make the one column of texts the only input. `types` are those that the user gives. Raises UserError."""
        found = [name for name in self.inputs if types.get(name) == "text"]
        is_text = {n: column.type == "category" and not column.style and not types.get(n) for n, column in self.columns.items()}
        found = found or [name for name in self.inputs if is_text[name]]
        if len(found) != 1:
            longest = max(found, key=lambda name: sum(map(len, words_of(cells.columns[name]).texts)), default="NAME")
            raise UserError(
                f"{cells.source}: a model of texts reads one column of them, and the inputs have {named(found) or 'none'}: name "
                f"one, as by data.columns=[{longest}:text]"
            )
        for name in {*self.inputs} - {*found}:
            self.left_out[name] = "the model reads one text"
        self.columns[found[0]], self.inputs = Column(found[0], "text", length), found
        self.doubts = {name: doubt for name, doubt in self.doubts.items() if name not in {*found, *self.left_out}}

    def unknown(self, rows: Cells) -> Iterator[tuple[str, int, list[str]]]:
        """Yield each input of which rows have categories that no training row has, how many rows, and these categories."""
        for name in self.inputs:
            count, found = self.columns[name].unknown(rows.columns[name])
            if count:
                yield name, count, found

    @property
    def plain(self) -> list[str]:
        """The columns of numbers that can be read as they are."""
        return [name for name, column in self.columns.items() if column.style == PLAIN_MARKS]

    @property
    def outputs(self) -> int:
        """The number of inputs of the model that a row becomes."""
        return sum(self.columns[name].outputs for name in self.inputs)

    def described(self) -> str:
        """Return in short what the inputs became, and what was left out."""
        numbers = [name for name in self.inputs if self.columns[name].type == NUMBER]
        parts = [f"{len(numbers)} number{'s' * (len(numbers) != 1)} ({named(numbers, 5)})"] if numbers else []
        parts += [f"{name} {self.columns[name].kind()}" for name in self.inputs if self.columns[name].type != NUMBER][:10]
        left = "".join(f"; {name} left out ({why})" for name, why in list(self.left_out.items())[:5])
        return f"inputs: {', '.join(parts)}{left}"

    def to_json(self) -> str:
        """Return the schema as text, to be kept with the run."""
        return json.dumps(
            {"missing": self.missing, "inputs": self.inputs, "columns": [asdict(column) for column in self.columns.values()]},
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> TableSchema:
        """Return the schema that `to_json` wrote. Raises ValueError where no run wrote it: its folder may be a stranger's."""
        content = parse_json(text)
        if not (isinstance(content, dict) and content.keys() == KEYS.keys() and all(fits(content[k], KEYS[k]) for k in KEYS)):
            raise ValueError("it is no schema of a table")
        columns = {}
        for entry in content["columns"]:
            if not _is_column(entry):
                raise ValueError(f"{entry!r:.80} is no column")
            columns[entry["name"]] = Column(**entry)
        if any(name not in columns or not columns[name].outputs for name in content["inputs"]):
            raise ValueError("its inputs are none of its columns")
        return cls(columns, tuple(content["missing"]), content["inputs"])


def _why_not(name: str, values: np.ndarray | Words) -> str:
    """Return why a column can be no input; "" where it can."""
    if name == NO_NAME:
        return "it has no name: an index"
    return "it has no value" if isinstance(values, Words) and not len(values.words) else ""


def columns_of(
    schema: TableSchema, cells: Cells, targets: Sequence[str], classes: Sequence[str] | None, refused: Mapping[str, UserError]
) -> dict[str, list[str]]:
    """Return in words what each column of a table became, its range or categories, missing cells and examples.

    `classes` are those of the targets, where these are classes; `refused` has the columns that cannot be read, and why.
    """
    rows = [(name, f"left out: {error}", "", "", "") for name, error in refused.items()]
    wanted = {name: cells.columns[name] for name in schema.columns if name in cells.columns}
    known = schema.read(Cells(wanted, cells.source, cells.lines)).columns
    for name, values in cells.columns.items():
        became = f"left out: {_why_not(name, values) or 'not asked for (data.columns)'}"
        if name in targets and classes is not None and len(targets) == 1:
            became = f"the target, {len(classes)} classes"
        elif name in targets or name in schema.inputs:
            became = f"{'the target, ' if name in targets else ''}{schema.columns[name].kind()}"
        gaps, words = int(absent(values).sum()), words_of(values)
        examples = [words.texts[code] for code in dict.fromkeys(words.codes[:FIRST_ROWS].tolist()) if code >= 0][:SHOWN]
        span = _span(known.get(name, values)) if gaps < len(cells) else ""
        rows.append((name, became, span, f"{gaps:,}" if gaps else "–", ", ".join(examples)))
    names = ("column", "became", "values", "missing", "examples")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def _span(values: np.ndarray | Words) -> str:
    """Return the range of numbers or dates in words, or the commonest texts with their shares."""
    if not isinstance(values, Words) and values.ndim > 1:
        days = sorted(map(tuple, values[~absent(values), :3].astype(int).tolist()))
        return f"{date(*days[0])} to {date(*days[-1])}"
    if not isinstance(values, Words):
        return f"{np.nanmin(values):g} to {np.nanmax(values):g}, mean {np.nanmean(values):.6g}"
    counts = np.bincount(values.codes[values.codes >= 0], minlength=len(values.texts))
    shares = [f"{values.texts[n]} {100 * counts[n] / len(values):.3g} %" for n in (-counts).argsort(kind="stable")[:SHOWN]]
    return ", ".join(shares) + (", …" if len(values.texts) > SHOWN else "")


KEYS = {"missing": list[str], "inputs": list[str], "columns": list[object]}
ENTRY = {"name": str, "type": str, "style": object, "categories": list[str] | None, "mean": list[float], "std": list[float]}


def _is_column(entry: object) -> bool:
    """True if an entry of a file has what `to_json` writes of a column."""
    if not (isinstance(entry, dict) and entry.keys() == ENTRY.keys() and all(fits(entry[k], kind) for k, kind in ENTRY.items())):
        return False
    categories, mean, std, style = entry["categories"], entry["mean"], entry["std"], entry["style"]
    right_style = {
        "number": fits(style, dict[str, str])
        and style.keys() == PLAIN_MARKS.keys()
        and (style["decimal"], style["thousands"]) in STYLES
        and bool(re.fullmatch(f"({UNIT})?", style["unit"])),
        "category": style in (None, BOOLEAN) and not mean,
        "text": fits(style, int) and style > 0 and not mean,
        "date": isinstance(style, list) and len(style) == 2 and style[0] in ("", *FORMS) and style[1] in (4, 5),
    }.get(entry["type"], False)
    sizes = {"number": (0, 1), "category": (0,), "text": (0,), "date": (0, 4, 5)}.get(entry["type"], ())
    few = categories is None or (entry["type"] == "category" and 0 < len(categories) <= MAX_CATEGORIES)
    scales = len(mean) == len(std) and len(mean) in sizes and all(map(math.isfinite, (*mean, *std))) and all(s > 0 for s in std)
    return bool(few and scales and right_style)


def named(names: Sequence[str], most: int = 10) -> str:
    """Return columns for a message, the first ten."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_names(names: Sequence[str], known: Sequence[str], setting: str, source: object) -> None:
    """Raise UserError for a name that is no column."""
    for name in names:
        if name not in known:
            raise UserError(f"{setting}={name} is no column of {source}: {did_you_mean(name, known)}")


@dataclass
class TargetReader:
    """Reads the targets of every source, in the columns `names` of its cells.

    Their classes come from all rows of the training file, their scale from those that train. By these the targets of every other
    set are read.
    """

    kind: TargetKind
    names: Sequence[str]
    setting: str  # that names the columns, for messages
    separator: str | None = None  # between several labels in one cell
    classes: Sequence[str] | None = None  # of the outputs, once they are known; None for values, and for numbers without names
    numbered: bool = False  # a whole number is the number of a class, which has no name
    hint: str = ""  # what says which cells hold no value
    units: Units | None = None

    def learn(self, rows: Cells, train: Cells) -> None:
        """Find the classes in all rows of the training file, or the values' mean and deviation in those that train."""
        if self.kind == "values":
            self._numbers(rows)
            scales = [mean_and_std(values) for values in self._numbers(train).T]
            self.units = Units(*map(torch.tensor, zip(*scales, strict=True)))
        elif self.kind == "labels" and self.separator is None:
            self.classes = list(self.names)
        elif self.classes is None:
            values = self._column(rows)
            if isinstance(values, Words) or self.separator is not None:
                self.classes = sorted({name for parts in self._parts(words_of(values)) for name in parts})
            elif not self.numbered:
                self.classes = [as_text(number) for number in sorted(set(values.tolist()))]

    def of(self, own: Splits) -> Self:
        """Return the reader with the classes, or the mean and deviation, of a run's own data. Raises UserError."""
        self.units, self.classes = own.units, None if own.names is None else list(own.names)
        if self.kind == "values" and (own.units is None or len(own.units.mean) != len(self.names)):
            raise UserError(f"{self.setting}={list(self.names)}: the run does not predict so many numbers")
        if self.kind == "labels" and self.separator is None and self.classes not in (None, list(self.names)):
            raise UserError(f"{self.setting}={list(self.names)}: the run's labels are {named(self.classes or ())}")
        return self

    def read(self, rows: Cells) -> torch.Tensor:
        """Return the targets of rows: class numbers (n,) int64, labels (n, k) of 0 and 1, or standardised values (n, k)."""
        if self.kind == "class" or self.separator is not None:
            return self._as_numbers(rows) if self.classes is None else self._by_name(rows, self.classes)
        values = self._numbers(rows)
        if self.units is not None:
            return (torch.from_numpy(values).float() - self.units.mean) / self.units.std
        if ((values != 0) & (values != 1)).any():
            raise DataError(f"{rows.source}: columns of labels hold 0 and 1, and {', '.join(self.names)} hold other numbers")
        return torch.from_numpy(values).float()

    def about(self, sources: Sequence[tuple[str, Source]], classes: int | None = None) -> dict[str, object]:
        """Return what Splits say of the targets of sources, that of training first; `classes` is how many the user says.

        Raises DataError for a number of a class that the data cannot have.
        """
        outputs = len(self.classes or self.names)
        if self.kind == "class" and self.classes is None:
            labels = [source.labels() for _, source in sources]
            highest = max(int(each.max()) for each in labels if each is not None)
            outputs = number_of_classes(highest, len(sources[0][1]), classes, self.setting)
        return {"classes": outputs, "names": self.classes, "units": self.units}

    def _column(self, rows: Cells) -> np.ndarray | Words:
        """Return the one column of classes or labels; a row may have no labels."""
        if len(self.names) != 1:
            raise UserError(
                f"{self.setting}={list(self.names)}: a class is one column: name one, or set data.kind=labels or values"
            )
        return self._known(rows, self.names[0]) if self.kind == "class" else rows.columns[self.names[0]]

    def _known(self, rows: Cells, name: str) -> np.ndarray | Words:
        values = rows.columns[name]
        if (empty := absent(values)).any():
            raise DataError(
                f"{rows.place(int(empty.argmax()))} has no value in the target column {name}, and {int(empty.sum())} of "
                f"{len(empty):,} rows have none: remove them{self.hint}"
            )
        return values

    def _as_numbers(self, rows: Cells) -> torch.Tensor:
        """Return whole numbers as those of classes."""
        values, name = self._column(rows), self.names[0]
        numbers = np.full(len(values), -1.0) if isinstance(values, Words) else values
        if (wrong := (numbers < 0) | (numbers != np.rint(numbers))).any():
            row = int(wrong.argmax())
            found = repr(values.texts[values.codes[row]]) if isinstance(values, Words) else f"{values[row]:g}"
            raise DataError(f"{rows.place(row)}: the class {found} of {name} is no whole number from 0 on, as others are")
        return torch.from_numpy(numbers).long()

    def _by_name(self, rows: Cells, classes: Sequence[str]) -> torch.Tensor:
        """Return the classes or labels of words by the numbers that their names have."""
        words = words_of(self._column(rows), classes)
        parts, numbers = self._parts(words), {name: number for number, name in enumerate(classes)}
        wrong = np.isin(words.codes, [n for n, names in enumerate(parts) if not numbers.keys() >= {*names}])
        if wrong.any():
            unknown = sorted({name for n in np.unique(words.codes[wrong]).tolist() for name in parts[n]} - numbers.keys())
            hint = ": others have names" if self.numbered else ": if it is a number to predict, set task=regression"
            raise DataError(
                f"{rows.place(int(wrong.argmax()))}: no training row has the {'class' if self.kind == 'class' else 'label'} "
                f"{named(unknown, 5)} of {self.names[0]}{hint if all(map(is_number, unknown)) else ''}"
            )
        codes = torch.from_numpy(words.codes).long()
        if self.kind == "class":
            return torch.tensor([numbers.get(name, 0) for (name,) in parts], dtype=torch.int64)[codes]
        target = torch.zeros(len(parts) + 1, len(numbers))  # the last one is of rows without a word
        for n, names in enumerate(parts):
            target[n, [numbers[name] for name in names if name in numbers]] = 1.0
        return target[codes]

    def _parts(self, words: Words) -> list[list[str]]:
        """Return the names in each word."""
        if self.separator is None:
            return [[text] for text in words.texts]
        return [[part.strip() for part in text.split(self.separator) if part.strip()] for text in words.texts]

    def _numbers(self, rows: Cells) -> np.ndarray:
        """Return the columns as float64 (n, k). Truths are 1 and 0."""
        found = []
        for name in self.names:
            values = self._known(rows, name)
            if isinstance(values, Words) and set(values.texts) <= {"true", "false"}:
                values = np.array([text == "true" for text in values.texts], float)[values.codes]
            if isinstance(values, Words):
                raise DataError(
                    f"{rows.place(0)}: the target column {name} holds texts, such as {values.texts[values.codes[0]]!r}, and "
                    "regression wants numbers: set task=classification, or data.columns={" + name + ": number}"
                )
            found.append(values)
        return np.stack(found, 1)
