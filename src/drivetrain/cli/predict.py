"""`drivetrain predict`: what a finished run says of new inputs, as a table."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.cli import run_arguments
from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.ui.output import echo

HELP = f"""\
drivetrain predict RUN INPUT … [--out FILE] [key=value] …      labels and probabilities of new inputs, a row for each

  drivetrain predict outputs/2026-11-21/07-37-57-4262f6 photo.jpg more_photos/ --out predictions.csv
  drivetrain predict outputs/2026-11-21/07-37-57-4262f6 arrays.npy --out predictions.parquet
  drivetrain predict outputs/2026-11-21/07-37-57-4262f6 houses.csv --out prices.csv
  find photos -name '*.jpg' | drivetrain predict outputs/2026-11-21/07-37-57-4262f6 - > predictions.csv
  drivetrain predict outputs/2026-11-21/07-37-57-4262f6 --data test --out predictions.csv

  INPUT                 image files; folders of them; arrays of samples as the data set has them (.npy, .npz, .pt);
                        tables where the run reads tables (.csv, .tsv, .parquet, …); texts (.jsonl) where it reads those;
                        - reads lines: paths of image files, a CSV, or texts, whichever the run reads
  --data test           the run's own test set (or validation, train), with a column of the right answers
  --out FILE            .csv, .jsonl or .parquet; default: CSV on standard output
  --max-tokens 256      of an answer, of a run that writes answers (task=instruction); --temperature 0.7 draws them instead of
                        taking the likeliest, --seed 1 draws others, --stop TEXT ends them before this text (may be repeated)
  --batch N             samples at a time; default: as in the run's evaluation, of tables at least 1,024
{run_arguments.OF_CHOICE}

Inputs are resized, encoded and normalised as in the run's evaluation. One that cannot be read gets a row with the reason.

exit codes: 0 done · 1 some inputs could not be read · 2 nothing was predicted
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain predict`; its exit code."""
    splits = {"choices": ["test", "validation", "train"]}
    writing = {"max_tokens": int, "temperature": float, "seed": int}
    options: dict[str, dict[str, Any]] = {
        "out": {"type": Path},
        "data": splits,
        "batch": {"type": int},
        "stop": {"action": "append"},
    }
    options |= {name: {"type": kind} for name, kind in writing.items()}
    if (given := run_arguments.parse("predict", argv, HELP, **options)) is None:
        return DONE
    if bool(given.paths) == bool(given.options.data):
        raise UserError("drivetrain predict needs either inputs (files, folders, arrays, or - for lines), or --data test")
    if given.options.batch is not None and given.options.batch < 1:
        raise UserError(f"--batch {given.options.batch}: give 1 or more")
    for name, least in {"max_tokens": 1, "temperature": 0, "seed": 0}.items():
        if (value := getattr(given.options, name)) is not None and not least <= value < 2**31:
            raise UserError(f"--{name.replace('_', '-')} {value}: give {least} or more")
    from drivetrain.inference import inputs
    from drivetrain.inference.answers import Answers
    from drivetrain.inference.loaded import load
    from drivetrain.inference.predict import Outputs, Predictor, predict_all
    from drivetrain.inference.tables import Output
    from drivetrain.inference.transforms import ROWS
    from drivetrain.ui.progress import Rate

    split = given.options.data
    loaded = load(given.run_dir, given.overrides, given.config_dirs, given.choice, with_data=split is not None)
    loaded.check_rows(split)
    words = {"most": "max_tokens", "temperature": "temperature", "seed": "seed", "stops": "stop"}
    chosen = {key: value for key, name in words.items() if (value := getattr(given.options, name)) is not None}
    if chosen and not loaded.writes_answers:
        raise UserError(f"--{words[next(iter(chosen))].replace('_', '-')} is for runs that write answers: task=instruction")
    predictor: Predictor = Answers(loaded, **chosen) if loaded.writes_answers else Outputs(loaded)
    size = given.options.batch or max(loaded.batch_size(), ROWS if loaded.transforms.reads_rows else 1)
    lines = sys.stdin.buffer if hasattr(sys.stdin, "buffer") else (line.encode() for line in sys.stdin)
    items, count = loaded.items_of(split, size) if split else inputs.given(given.paths, loaded.transforms, lines, size)
    with Output(given.options.out) as output, Rate("predictions", count) as rate:
        counts = predict_all(loaded, predictor, items, size, output, rate, with_targets=split is not None)
    where = f": {given.options.out}" if given.options.out is not None else ""
    echo(f"{rate.text()}{where}", file=sys.stderr)
    for name, unknown in sum(loaded.transforms.unknown, Counter[str]()).items():
        echo(f"{unknown:,} rows have a value of {name} that no training row has: it counts as none", file=sys.stderr)
    if counts.unreadable:
        more = f" and {counts.unreadable - 1} more" if counts.unreadable > 1 else ""
        echo(f"error: {counts.unreadable} inputs could not be read: {counts.first_error}{more}", file=sys.stderr)
    return FAILED if counts.unreadable else DONE


def complete(words: Sequence[str], last: str) -> list[str]:
    """What TAB offers."""
    return run_arguments.complete(words, last, "--out", "--data", "--batch", "--max-tokens", "--temperature", "--stop", "--seed")
