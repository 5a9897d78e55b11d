"""Tables: rows of numbers, categories and dates, from CSV, Parquet or NumPy files, and two of scikit-learn's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.options.allowed import ColumnName, Text
from drivetrain.core.options.option import Count, RunSpec
from drivetrain.core.step import rng
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.data.base import Fraction, FromFile, HeldOut, Inputs, Splits, Tensors, number_apart
from drivetrain.data.baseline import Baseline
from drivetrain.data.cells import Cells, Words, absent
from drivetrain.data.schema import TYPES, TableSchema, check_names, columns_of, named
from drivetrain.data.tables import KINDS, MISSING, Form, NativeTable, StreamedTable, TextTable, open_table
from drivetrain.data.target_reader import TargetReader
from drivetrain.data.text import LabelledTexts, TextData, tell_cut
from drivetrain.data.tokenizer import Documents, Tokenizer
from drivetrain.data.untrusted import as_kept

KEPT = "table.json"  # in the run's directory: the reading and the encoding of rows
TableKind = Literal["class", "values", "labels"]
OneColumn = ColumnName | int  # columns of arrays have numbers
# An input column, and after a colon its type; * means all others. `data.columns={zone: category}` is [zone:category,*].
Typed = Annotated[str, Text(rf"(\w[^/\\:\x00-\x1f]{{0,99}}|\*)(:({'|'.join(TYPES)}))?", "a column's name, or name:type")] | int
Missing = Sequence[Annotated[str, Text(r"[^\s\x00-\x1f]{0,20}", "a word without a space")] | int | float]
Delimiter = Annotated[str, Text(r"[^\w\r\n\"]", "one sign, such as ;")]


def names_of(given: OneColumn | Sequence[OneColumn] | None) -> list[str]:
    """Return the names of one or several columns."""
    return [] if given is None else [str(given)] if isinstance(given, str | int) else [str(name) for name in given]


def form_of(delimiter: str | None, encoding: str | None, header: bool | None = None, na: Missing | None = None) -> Form:
    """Return the format of a table by the settings."""
    return Form(delimiter, encoding, header, MISSING if na is None else ("", *(str(word).lower() for word in na)))


Known = tuple[TableSchema, TargetReader, "Tokenizer | None"]  # the encoder of a table's rows; a tokenizer for a single text


class TabularData:
    """The common part of tables; predictions are for rows of a table with the same columns."""

    max_value: ClassVar[float | None] = None
    missing: str = "refuse"
    normalize: bool
    baseline: bool
    targets: TargetKind | None
    reads_rows = True

    def form(self) -> Form:
        """Return the format of its files."""
        return Form()

    def fractions(self, every: Cells) -> np.ndarray:
        return every.fractions()

    def learn(self, known: Known, every: Cells, train: Cells) -> None:
        schema, reader, _ = known
        reader.learn(every, train)
        schema.learn(train, self.normalize)

    def source(self, known: Known, part: Cells) -> Rows | TextRows:
        schema, reader, tokenizer = known
        if tokenizer is not None:
            return TextRows(part, schema, reader.read(part), tokenizer)
        said = [
            f"{part.source}: {count:,} rows have a value of {name} that no training row has ({named(words, 3)}): it counts as "
            "none"
            for name, count, words in schema.unknown(part)
        ]
        return Rows(schema.encode(part), reader.read(part), part, said)

    def about(self, known: Known, sources: Sequence[tuple[str, Rows | TextRows]], own: Splits | None) -> dict[str, object]:
        schema, reader, tokenizer = known
        files = {KEPT: schema.to_json(), **({} if tokenizer is None else tokenizer.files())}
        about: dict[str, object] = {
            **reader.about(sources), "shape": (schema.outputs,), "normalize": None, "files": files,
            "inputs": schema.described(),
            "doubts": [*schema.doubts.values(), *(line for _, source in sources for line in source.said)],
        }  # fmt: skip
        if tokenizer is not None and isinstance(train := sources[0][1], TextRows):
            tell_cut(train.lengths, schema.outputs, len(train))
            about |= {"dtype": torch.int64, "vocabulary": tokenizer.vocabulary, "pad_token": tokenizer.padding}
        return about

    def complete(self, cells: Cells, schema: TableSchema) -> Cells:
        """Return the values of rows. Raises DataError if an input is missing and must be refused."""
        rows = schema.read(cells)
        gaps = {name: gap for name in schema.inputs if (gap := absent(rows.columns[name])).any()}
        if gaps and self.missing == "refuse":
            raise DataError(
                f"{rows.place(min(int(gap.argmax()) for gap in gaps.values()))} and others have no value in "
                f"{named([f'{name} ({gap.sum()})' for name, gap in gaps.items()])}: set data.missing=fill (numbers: the mean of "
                "the training rows; texts: a category of their own), leave columns out by data.columns, or mend the table "
                f"(without a value is a cell that is empty, or {' '.join(filter(None, schema.missing))}: data.na)"
            )
        return rows

    def fitted_baseline(self, data: Splits) -> Baseline | None:
        return Baseline(data.train, self.targets, data.classes) if self.baseline else None

    def describe_row(self, x: torch.Tensor, data: Splits) -> Mapping[str, str]:
        return schema_of(data).described_row(x.numpy())

    def kept_rows(self, schema: TableSchema, data: Splits) -> Tokenizer | None:
        """Return the tokenizer of a run that reads one text of each row; None if it reads columns."""
        return None

    def read_inputs(self, file: Path | Iterable[bytes], data: Splits, size: int) -> Inputs:
        schema, source = schema_of(data), file if isinstance(file, Path) else "standard input"
        table = open_table(file, self.form()) if isinstance(file, Path) else StreamedTable(file, self.form(), str(source))
        check_has(table, schema.inputs, f"{source} has no column {{}}: the model's inputs are {named(schema.inputs)}")
        unknown: Counter[str] = Counter()
        tokenizer = self.kept_rows(schema, data)

        def read(cells: Callable[[slice], Cells], which: slice) -> torch.Tensor:
            rows = self.complete(cells(which), schema)
            for name, count, _ in schema.unknown(rows):
                unknown[name] += count
            if tokenizer is None:
                return schema.encode(rows)
            return TextRows(rows, schema, torch.zeros(len(rows)), tokenizer).fetch(torch.arange(len(rows)))[0]

        blocks = table.blocks(size, schema.plain, schema.inputs)
        return Inputs(((places, partial(read, cells)) for places, cells in blocks), unknown)


def check_has(table: TextTable | NativeTable | StreamedTable, names: Sequence[str], problem: str) -> None:
    """Raise UserError if a table lacks columns; `problem` is a format for their names."""
    if lacking := [name for name in names if name not in table.names]:
        raise UserError(problem.format(named(lacking)))


def schema_of(data: Splits) -> TableSchema:
    """Return a run's schema. Raises UserError if it is invalid, or gives other inputs than the model's."""
    with as_kept(KEPT):
        schema = TableSchema.from_json(data.files[KEPT])
        if (schema.outputs,) != tuple(data.shape):
            raise ValueError(f"its columns make {schema.outputs} inputs, and the model takes {list(data.shape)}")
    return schema


class Rows(Tensors):
    """The rows of a table as a source, with the keys of their content before encoding, and their places."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, cells: Cells, said: Sequence[str] = ()) -> None:
        super().__init__(x, y)
        self._keys, self._places, self.said = cells.keys(), cells.places(), said

    def name(self, index: int) -> str:
        """Return the row's file and line."""
        return self._places(index if self._rows is None else int(self._rows[index]))

    def subset(self, indices: torch.Tensor) -> Rows:
        made = copy(self)
        made._rows = indices if self._rows is None else self._rows[indices]
        return made

    def identities(self) -> torch.Tensor:
        """Return the key of each row, int64 (n,)."""
        keys = torch.from_numpy(self._keys.view(np.int64))
        return keys if self._rows is None else keys[self._rows]


class TextRows(LabelledTexts):
    """The rows of a table as a source, for a model that reads one text of each."""

    said: Sequence[str] = ()

    def __init__(self, rows: Cells, schema: TableSchema, y: torch.Tensor, tokenizer: Tokenizer) -> None:
        words, length = rows.columns[str(schema.text)], schema.outputs
        assert isinstance(words, Words)
        tokens = tokenizer.whole([*words.texts, ""], length)
        keys = torch.from_numpy(rows.keys().view(np.int64))
        documents = Documents.of([tokens[code] for code in words.codes.tolist()], keys)
        super().__init__(documents, y, length, 1, tokenizer.shift, tokenizer.padding or 0)
        self._places = rows.places()

    def name(self, index: int) -> str:
        return self._places(int(self.which[index]))


@dataclass(kw_only=True, eq=False)
class Tabular(TabularData, FromFile[Cells, Known, "Rows | TextRows"], TextData):
    """A table (CSV, Parquet, NumPy) to predict its columns `target` from the other columns.

    Numbers and the parts of dates are standardised by the training rows, texts become one column for each category. A model
    with a tokenizer reads the one column of texts, up to `length` tokens of each. Without a test table, the share `holdout` of
    the rows is held out, chosen by the hash of their content.
    """

    machine_local_keys = ("path", "test")
    samples_are: ClassVar[str] = "rows"
    reads_what: ClassVar[str] = f"a table in a file ({KINDS})"
    reads: ClassVar[tuple[TargetKind, ...]] = ("class", "values", "labels")

    target: OneColumn | Sequence[OneColumn] | None = None
    columns: Sequence[Typed] | None = None
    kind: TableKind | None = None
    length: Count = 256
    missing: Literal["refuse", "fill"] = "refuse"
    na: Missing | None = None
    decimal: Literal[".", ","] | None = None
    delimiter: Delimiter | None = None
    header: bool | None = None
    normalize: bool = True
    holdout: Fraction = 0.2
    drop_last: bool = False
    baseline: bool = False

    text_remedy = "name its column of texts, as by data.columns=[NAME:text]"

    def resolve(self, run: RunSpec) -> Self:
        tokens = run.model.has_tokenizer or "text" in self._types().values()
        return super(Tabular, self.with_values(tokens=tokens)).resolve(run)

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not names_of(self.target):
            yield "data=tabular needs data.target, the column that is predicted (several: data.target=[a,b])"
        if self.baseline and self.tokens:
            yield f"data.baseline=true is fitted on columns, and {run.named('model')} reads a text: set it to false"
        for name, kind in self._types().items():
            if kind not in ("", *TYPES):
                yield f"data.columns={{{name}: {kind}}}: a column's type is one of {', '.join(TYPES)}"

    def read(self) -> tuple[Cells, Known]:
        path, targets, given = Path(str(self.path)), names_of(self.target), self._types()
        table = open_table(path, self.form())
        names, types = self._inputs(table, targets, given)
        cells = table.cells()
        schema = TableSchema.decided(cells, types, self.form().missing, self.decimal, table.decimal, targets)
        schema.inputs = [name for name in names if name in schema.columns]
        schema.leave_out_ids(cells, given, bool(self.tokens))
        if self.tokens:
            schema.read_as_text(cells, types, self.length)
        for name in (*targets, *names):
            if name in table.refused:
                raise table.refused[name]
            if name in schema.left_out and (name in {**dict.fromkeys(targets), **given} or not schema.inputs):
                raise UserError(f"{path}: the column {name} cannot be used: {schema.left_out[name]}")
        tokenizer = self.given_tokenizer() if self.tokens else None
        return self.complete(cells, schema), (schema, self._reader(), tokenizer)

    def describe_columns(self, data: Splits) -> Mapping[str, Sequence[str]]:
        table, schema = open_table(Path(str(self.path)), self.form()), schema_of(data)
        return columns_of(schema, table.cells(schema.plain), names_of(self.target), data.names, table.refused)

    def kept(self, own: Splits) -> Known:
        schema = schema_of(own)
        return schema, self._reader().of(own), self.kept_rows(schema, own)

    def kept_rows(self, schema: TableSchema, data: Splits) -> Tokenizer | None:
        return None if schema.text is None else self.kept_tokenizer(data)

    def _reader(self) -> TargetReader:
        hint = " (data.na says which words are no value)"
        return TargetReader(self.targets or "class", names_of(self.target), "data.target", hint=hint)

    def form(self) -> Form:
        return form_of(self.delimiter, self.encoding, self.header, self.na)

    def _types(self) -> dict[str, str]:
        """Return the named columns with their types; "" without one."""
        parts = [str(column).rpartition(":") if ":" in str(column) else (str(column), "", "") for column in self.columns or ()]
        return {name: kind.strip() for name, _, kind in parts}

    def _inputs(
        self, table: TextTable | NativeTable, targets: Sequence[str], given: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """Return the names of the columns that may be inputs, and the types of columns. Raises UserError."""
        check_names(targets, table.names, "data.target", self.path)
        check_names([name for name in given if name != "*"], table.names, "data.columns", self.path)
        if both := [name for name in targets if name in given and not given[name]]:
            raise UserError(f"data.columns has the target {named(both)}: the model would be given what it is to predict")
        others = [name for name in table.names if name not in given] if "*" in given or not given else []
        names = [name for name in (table.names if others else given) if name not in targets and given.get(name) != "unused"]
        if not names:
            raise UserError(f"{self.path} has no column except the target: there is nothing to predict it from")
        return names, {**dict.fromkeys(others, given.get("*", "")), **given}

    def read_set(self, place: str, known: Known, split: str) -> Cells:
        schema, reader, _ = known
        table, wanted = open_table(Path(place), self.form()), [*schema.inputs, *reader.names]
        check_has(table, wanted, f"data.{split}={place} has no column {{}}, which the run's own table has")
        check_names(reader.names, list(schema.columns), "data.target", "the run's own table")
        return self.complete(table.cells(schema.plain, wanted), schema)


DIABETES = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")
WINE = (
    "alcohol", "malic_acid", "ash", "alcalinity_of_ash", "magnesium", "total_phenols", "flavanoids", "nonflavanoid_phenols",
    "proanthocyanins", "color_intensity", "hue", "od280_od315", "proline",
)  # fmt: skip


@dataclass(kw_only=True, eq=False)
class ScikitLearn(TabularData, HeldOut[Cells, Known, "Rows | TextRows"]):
    """A table that is part of scikit-learn. Nothing is downloaded. The same rows are held out in every run."""

    rows: ClassVar[int]
    inputs: ClassVar[int]
    target: ClassVar[str]

    holdout: Fraction = 0.2
    validation: Fraction | None = 0.2
    normalize: bool = True
    drop_last: bool = False
    baseline: bool = False

    def shape(self) -> tuple[int, ...]:
        return (self.inputs,)

    def loaded_samples(self) -> int:
        return self.rows - number_apart(self.rows, self.holdout)

    def table(self) -> dict[str, np.ndarray]:
        """Return the table's columns."""
        raise self.unwritten("table")

    def describe_columns(self, data: Splits) -> Mapping[str, Sequence[str]]:
        return columns_of(schema_of(data), Cells(self.table(), ""), [self.target], data.names, {})

    def read(self) -> tuple[Cells, Known]:
        rows = Cells(self.table(), f"scikit-learn's {type(self).__name__.lower()}")
        schema = TableSchema.decided(rows, {})
        schema.inputs = [name for name in rows.columns if name != self.target]
        return rows, (schema, TargetReader(self.targets or "class", [self.target], "target"), None)

    def divided(self, every: Cells) -> tuple[Cells, Cells]:
        order, count = rng.permutation(0, 0, len(every)).numpy(), number_apart(len(every), self.holdout)
        return every[order[count:]], every[order[:count]]


class Diabetes(ScikitLearn):
    """442 patients: ten measurements, and the progress of the illness a year later (Efron et al. 2004)."""

    rows, inputs, target = 442, 10, "progression"
    targets = "values"

    def table(self) -> dict[str, np.ndarray]:
        table = np.loadtxt(data_file("diabetes_data_raw.csv.gz"))
        return {**dict(zip(DIABETES, table.T, strict=True)), "progression": np.loadtxt(data_file("diabetes_target.csv.gz"))}


class Wine(ScikitLearn):
    """178 wines from three growers: thirteen measurements, and the grower (Forina et al., UCI 1991)."""

    rows, inputs, target = 178, 13, "grower"
    targets = "class"

    def table(self) -> dict[str, np.ndarray]:
        table = np.loadtxt(data_file("wine_data.csv"), delimiter=",", skiprows=1)
        return dict(zip((*WINE, "grower"), table.T, strict=True))


def data_file(name: str) -> Path:
    """Return the path of a file in scikit-learn's folder of data. Raises UserError."""
    spec = find_spec("sklearn")
    root = Path(next(iter(spec.submodule_search_locations or [""]))) if spec else Path()
    file = root / "datasets" / "data" / name
    if not file.is_file():
        raise UserError(f"scikit-learn's file {name} is not there: pip install scikit-learn")
    return file
