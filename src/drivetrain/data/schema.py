"""The schema of a table: how its columns become inputs and targets. It is determined once, on the training file, and saved."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from typing import Any, Literal, get_args

from drivetrain.core.errors import DataError, UserError, collecting, did_you_mean, refuse
from drivetrain.core.lazy import arrow_compute as pc
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.machine.files import parse_json
from drivetrain.core.typed import fits
from drivetrain.data.cell_formats import (
    DATES,
    FORMS,
    PARTS,
    PLAIN,
    PLAIN_MARKS,
    STYLES,
    UNIT,
    Style,
    date_form,
    decimal_of,
    read_dates,
    styles_of,
    words_of,
)
from drivetrain.data.cells import Cells, Words, absent, numbers_of
from drivetrain.data.tables import MISSING, NO_NAME


def mean_and_std(values: np.ndarray) -> tuple[float, float]:
    """Return the mean and the deviation of numbers; 1 if they are equal up to rounding, as in scikit-learn."""
    if not len(values):
        return 0.0, 1.0
    mean, variance, eps = float(values.mean()), float(values.var()), 2.0**-52
    alike = variance <= len(values) * eps * variance + (len(values) * mean * eps) ** 2
    return mean, 1.0 if alike else math.sqrt(variance)


ColumnType = Literal["number", "category", "date", "text"]
TYPES = (*get_args(ColumnType), "unused")  # that the user may set
MAX_CATEGORIES = 1000  # of one column; with more it holds texts or row numbers, not categories
NO_VALUE = "(missing)"  # the category of a missing text
NEARLY_ALL = 0.9
SHOWN, FIRST_ROWS = 3, 100  # shown values of a column, and rows to take examples from
ID = re.compile(r"(?i:(.*[_ -])?(id|uuid|guid|no|nr|number|key|code)|index|row(_?id)?)|.*[a-z](Id|ID)")  # names of such columns
FEW_ROWS = 20  # too few to judge that something looks wrong
NUMBER = "number"
BOOLEAN = "boolean"
LARGEST = 3.4028234663852886e38  # of float32, the dtype of models


@dataclass
class Column:
    """A column of a table: how to read it, and for an input how to encode its values."""

    name: str
    type: ColumnType
    # Of a number: its Style; of a date: the form, and its number of parts; of a category: whether it holds truths; of a text:
    # the most tokens that a model reads of it.
    style: Any = None
    categories: list[str] | None = None
    mean: list[float] = field(default_factory=list)  # also replaces a missing number; of a date one for each part
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
            wrong = [values.texts[n] for n in (~right).nonzero()[0]]
            forms = f" ({DATES})" if self.type == "date" else ""
            raise DataError(
                f"{cells.these(np.isin(values.codes, (~right).nonzero()[0]))}: the column {self.name} holds "
                f"{', '.join(map(repr, wrong[:5]))}{' …' if len(wrong) > 5 else ''}, "
                f"and {'the training rows have' if self.mean else 'it is to hold'} {self.type}s there{forms}"
            )
        nothing = np.full((1, *numbers.shape[1:]), np.nan)  # for rows without a word
        return np.asarray(np.concatenate([numbers, nothing])[values.codes])

    def learn(self, values: np.ndarray | Words, normalize: bool) -> None:
        """Find the categories, or the mean and deviation, of training rows. Raises UserError."""
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
        """Write the inputs (n, outputs) into zeros. A category that is in no training row stays all zeros."""
        if isinstance(values, Words):
            codes = self._codes(values)
            rows = np.flatnonzero(codes < self.outputs)
            into[rows, codes[rows]] = 1
            return
        values = values.reshape(len(values), -1)
        into[:] = (np.where(np.isnan(values), self.mean, values) - self.mean) / self.std

    def unknown(self, values: np.ndarray | Words) -> tuple[int, list[str]]:
        """Return the number of values whose category is in no training row, and these categories."""
        if not isinstance(values, Words) or self.type == "text":
            return 0, []
        rows = values.codes[self._codes(values) == self.outputs]
        return len(rows), sorted({NO_VALUE if code < 0 else values.texts[code] for code in rows.tolist()})

    def _codes(self, words: Words) -> np.ndarray:
        code_of = {category: number for number, category in enumerate(self.categories or ())}
        return np.asarray(np.array([code_of.get(text, len(code_of)) for text in (*words.texts, NO_VALUE)])[words.codes])

    @property
    def outputs(self) -> int:
        """The largest number of the model's inputs that it is encoded as."""
        if self.type == "text":
            return int(self.style)
        return len(self.mean) if self.categories is None else len(self.categories)

    def kind(self) -> str:
        """Return a description of its encoding."""
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
    """The readable columns of a table, in its order."""

    columns: dict[str, Column]
    missing: tuple[str, ...] = MISSING
    inputs: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # column → why
    doubts: dict[str, str] = field(default_factory=dict)  # column → a likely mistake in it
    mixed: set[str] = field(default_factory=set)  # columns of numbers that also contain a text

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
        """Return the schema of a training file. `types` are the user's; `hint` is the file's likelier decimal mark.

        A target is never a date. Raises UserError if a number can be read in two ways.
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
            texts = values.texts if isinstance(values, Words) else []
            likeliest = max(("", *FORMS), key=lambda form: read_dates(texts, form, 4)[1].sum())  # it refuses the wrong cells
            return Column(name, "date", form or [likeliest, 4])
        if not styles and isinstance(values, Words):  # so that other cells are refused
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
            self.mixed.add(name)
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
        """Return the values of the columns that the cells have. Raises DataError, also for a number beyond float32."""
        values, problems = dict[str, np.ndarray | Words](), list[str]()
        for name, column in self.columns.items():
            with collecting(problems):
                values |= {name: column.read(cells)} if name in cells.columns else {}
        refuse(problems, DataError)
        for name, found in values.items():
            if not isinstance(found, Words) and (beyond := np.abs(found) > LARGEST).any():
                row = int(beyond.reshape(len(found), -1).any(1).argmax())
                raise DataError(
                    f"{cells.place(row)}: the column {name} holds a number that is infinite or beyond float32 "
                    f"({LARGEST:.1e}): mend it, or add it to data.na"
                )
        return Cells(values, cells.source, cells.lines, cells.numbers)

    def learn(self, rows: Cells, normalize: bool) -> None:
        """Fit the encoding of the inputs to training rows from `read`."""
        for name in self.inputs:
            self.columns[name].learn(rows.columns[name], normalize)

    def encode(self, rows: Cells) -> torch.Tensor:
        """Return inputs float32 (n, d) of rows from `read`."""
        encoded, first = np.zeros((len(rows), self.outputs), np.float32), 0
        for column in (self.columns[name] for name in self.inputs):
            column.encode(rows.columns[column.name], encoded[:, first : first + column.outputs])
            first += column.outputs
        return torch.from_numpy(encoded)

    def leave_out_ids(self, cells: Cells, named: Collection[str], texts: bool) -> None:
        """Leave out inputs that only identify rows: different in every row, called an id or a text, not `named` by the user.

        Texts stay if the model reads `texts`.
        """
        for name in [name for name in self.inputs if name not in named]:
            values, column = cells.columns[name], self.columns[name]
            every, rows = words_of(values), len(values)
            if len(self.inputs) == 1 or rows < FEW_ROWS or (every.codes < 0).any() or len(np.unique(every.codes)) < rows:
                continue
            if ID.fullmatch(name) or (column.type == "category" and not texts and name not in self.mixed):
                self.inputs.remove(name)
                self.left_out[name] = f"an id: it is different in every row; data.columns=['*',{name}] keeps it"
                self.doubts.pop(name, None)

    def described_row(self, encoded: np.ndarray) -> dict[str, str]:
        """Return the inputs as text from their encoding (d,) by `encode`: a missing number is the mean."""
        found, first = {}, 0
        for name in self.inputs:
            column = self.columns[name]
            part, first = encoded[first : first + column.outputs], first + column.outputs
            if column.categories is not None:
                found[name] = ", ".join(text for text, on in zip(column.categories, part, strict=True) if on)
            else:  # float32 has hardly more digits
                values = zip((part * column.std + column.mean).tolist(), column.std, strict=True)
                found[name] = ", ".join(f"{round(value, 5 - math.floor(math.log10(std))) + 0.0:.6g}" for value, std in values)
        return found

    @property
    def text(self) -> str | None:
        """The input that is a text, and then the only input; None without one."""
        return next((name for name in self.inputs if self.columns[name].type == "text"), None)

    def read_as_text(self, cells: Cells, types: Mapping[str, str], length: int) -> None:
        """Make the one column of texts the only input. `types` are the user's. Raises UserError."""
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
        """Yield each input with categories that are in no training row, the number of such rows, and these categories."""
        for name in self.inputs:
            count, found = self.columns[name].unknown(rows.columns[name])
            if count:
                yield name, count, found

    @property
    def plain(self) -> list[str]:
        """The columns of numbers in plain notation."""
        return [name for name, column in self.columns.items() if column.style == PLAIN_MARKS]

    @property
    def outputs(self) -> int:
        """The number of the model's inputs from a row."""
        return sum(self.columns[name].outputs for name in self.inputs)

    def described(self) -> str:
        """Return a short description of the inputs' encoding, and of the columns left out."""
        numbers = [name for name in self.inputs if self.columns[name].type == NUMBER]
        parts = [f"{len(numbers)} number{'s' * (len(numbers) != 1)} ({named(numbers, 5)})"] if numbers else []
        parts += [f"{name} {self.columns[name].kind()}" for name in self.inputs if self.columns[name].type != NUMBER][:10]
        left = "".join(f"; {name} left out ({why})" for name, why in list(self.left_out.items())[:5])
        return f"inputs: {', '.join(parts)}{left}"

    def to_json(self) -> str:
        """Return the schema as text, for the run's files."""
        return json.dumps(
            {"missing": self.missing, "inputs": self.inputs, "columns": [asdict(column) for column in self.columns.values()]},
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> TableSchema:
        """Return the schema that `to_json` wrote. Raises ValueError if no run wrote it: the folder may be a stranger's."""
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
    """Return why a column cannot be an input; "" if it can."""
    if name == NO_NAME:
        return "it has no name: an index"
    return "it has no value" if isinstance(values, Words) and not len(values.words) else ""


def columns_of(
    schema: TableSchema, cells: Cells, targets: Sequence[str], classes: Sequence[str] | None, refused: Mapping[str, UserError]
) -> dict[str, list[str]]:
    """Return for each column of a table, in words, its encoding, its range or categories, missing cells and examples.

    `classes` are those of the targets, if these are classes; `refused` has the unreadable columns, and why.
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
    """True if an entry of a file has the form that `to_json` writes for a column."""
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
    """Return the first `most` columns for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_names(names: Sequence[str], known: Sequence[str], setting: str, source: object) -> None:
    """Raise UserError for names that are not columns."""
    refuse(f"{setting}={name} is no column of {source}: {did_you_mean(name, known)}" for name in names if name not in known)
