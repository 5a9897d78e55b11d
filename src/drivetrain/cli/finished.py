"""The verbs on a finished run: evaluate, predict, export and card."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drivetrain.cli.arguments import FILE, FLAG, NUMBER, Command, overrides, runs
from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.machine.files import write_json
from drivetrain.core.machine.paths import expanded
from drivetrain.inference.finished import Choice
from drivetrain.run.result import uncertainty
from drivetrain.ui.output import echo
from drivetrain.ui.sheet import Table

OF_CHOICE = """\
  update=N              the checkpoint of this update; best: of the best evaluation; last: the newest valid one
                        (default: best if the run kept it, as with saving=best, else last)
  average=false         the trained weights instead of the average, for a run with ema=ema; average=0.08: the average
                        of this relative width, for a run with ema=post_hoc
  'trust=[my_pkg]'      for a run with code of your own: a run's files are not trusted to name code
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml"""


Work = Callable[[argparse.Namespace], int]


def _of_run(
    name: str, work: Work, text: str, options: Mapping[str, Mapping[str, Any]] | None = None, offered: Sequence[str] = ()
) -> Command:  # fmt: skip
    """A verb on a finished run, with RUN, the choice of a checkpoint, overrides, --config-dir, --help, and its own options.

    Its arguments have `run_dir`, `paths` (further words without =), `choice`, and `overrides` of the config.
    """

    def of_run(given: argparse.Namespace) -> int:
        from drivetrain.measure.verbs import split

        settings = [word for word in given.overrides if _is_setting(word)]
        run, *given.paths = [word for word in given.overrides if word not in settings] or [""]
        if not run:
            raise UserError(f"drivetrain {name} needs a run's directory, such as outputs/<date>/<time>-<id>")
        given.run_dir, (given.choice, given.overrides) = expanded(run), split(settings, Choice)
        return work(given)

    def offers(words: Sequence[str], last: str) -> list[str]:
        if (
            not any("=" not in word and not word.startswith("-") for word in words)
            and not last.startswith("-")
            and "=" not in last
        ):
            return runs()
        own = ["update=best", "update=last", "average=false", *(options or ()), *offered]
        return [*own, *overrides(words, last)]

    return Command(name, of_run, text, options or {}, takes_paths=True, offers=offers)


def _is_setting(word: str) -> bool:
    return "=" in word and "/" not in word.partition("=")[0] and not Path(word).exists()


def _evaluate(given: argparse.Namespace) -> int:
    """Run `drivetrain evaluate` with these arguments; its exit code."""
    if given.paths:
        raise UserError(f"drivetrain evaluate takes one run, and was given {', '.join(given.paths)} too")
    from drivetrain.inference.evaluation import evaluate
    from drivetrain.parallel.environment import launched, world_of_environment

    found = evaluate(given.run_dir, given.overrides, given.config_dir, given.choice)
    if launched() is not None and world_of_environment().rank != 0:  # rank 0 prints
        return DONE
    samples = f"{found.samples:,} sample{'s' * (found.samples != 1)}"
    which = f"{found.split} set, {samples}, update {found.update}" + (", averaged" if found.average else "")
    echo(f"{found.split} set: {samples} of {found.source}")
    open_yet = {name: uncertainty(value, found.shares.get(name, 0)) for name, value in found.metrics.items()}
    rows = [(name, f"{value:.6g} {open_yet[name]}".rstrip()) for name, value in found.metrics.items()]
    Table((str(given.run_dir), which), rows).show()
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(given.out, asdict(found))
        echo(f"written to {given.out}")
    return DONE


def _file(given: argparse.Namespace) -> Path | None:
    """The file to write, named by a word or by --out, or None. Raises UserError."""
    words = [*given.paths, *([str(given.out)] if given.out is not None else [])]
    if len(words) > 1:
        raise UserError(f"one file is written, but {' and '.join(words)} are named: leave out the others")
    return expanded(words[0]) if words else None


def _export(given: argparse.Namespace) -> int:
    """Run `drivetrain export` with these arguments; its exit code."""
    from drivetrain.inference import export
    from drivetrain.inference.finished import MODEL_ALONE, ONE_PROCESS, find

    formats = [kind for word in given.paths if (kind := export.format_named(word))]
    given.paths = [word for word in given.paths if export.format_named(word) is None]
    if len({*formats, *([given.format] if given.format else [])}) > 1:
        raise UserError(f"drivetrain export writes one format: {' or '.join([*formats, *filter(None, [given.format])])}")
    given.format = next(iter(formats), given.format)
    file = _file(given)
    kind, with_normalize = export.format_of(file, given.format), given.with_normalize
    if with_normalize and kind in ("safetensors", "transformers"):
        raise UserError(f"--with-normalize: {kind} holds only weights, no model that could normalise: set another --format")
    if given.adapter and kind != "transformers":
        raise UserError("--adapter writes an adapter for peft: set --format transformers")
    path = file or given.run_dir / f"model{export.SUFFIX[kind]}"
    overrides = [ONE_PROCESS, "ema=none", "precision=fp32", *given.overrides, "runtime.device=cpu"]
    finished = find("drivetrain export", given.run_dir, overrides, given.config_dir, given.choice, MODEL_ALONE)
    echo(export.write(finished, path, kind, with_normalize, given.adapter))
    return DONE


def _card(given: argparse.Namespace) -> int:
    """Run `drivetrain card` with these arguments; its exit code."""
    if given.overrides:
        raise UserError("drivetrain card needs a run's directory, and perhaps a file: drivetrain card RUN [FILE]")
    from drivetrain.inference import card
    from drivetrain.run import reader

    path = _file(given) or given.run_dir / "README.md"
    echo(f"written to {card.write(reader.read(given.run_dir), path)}")
    return DONE


def _predict(given: argparse.Namespace) -> int:
    """Run `drivetrain predict` with these arguments; its exit code."""
    if bool(given.paths) == bool(given.data):
        raise UserError("drivetrain predict needs either inputs (files, folders, arrays, or - for lines), or --data test")
    for name, least in {"batch": 1, "max_tokens": 1, "temperature": 0, "seed": 0}.items():
        if (value := getattr(given, name)) is not None and not least <= value < 2**31:
            raise UserError(f"--{name.replace('_', '-')} {value}: give {least} or more")
    from drivetrain.inference import inputs
    from drivetrain.inference.answers import Answers
    from drivetrain.inference.loaded import load
    from drivetrain.inference.predict import Outputs, output, predict_all
    from drivetrain.inference.transforms import ROWS
    from drivetrain.ui.progress import Rate

    split = given.data
    loaded = load(given.run_dir, given.overrides, given.config_dir, given.choice, with_data=split is not None)
    loaded.check_rows(split)
    words = {"most": "max_tokens", "temperature": "temperature", "seed": "seed", "stops": "stop"}
    chosen = {key: value for key, name in words.items() if (value := getattr(given, name)) is not None}
    if chosen and not loaded.run.task.writes_answers:
        raise UserError(f"--{words[next(iter(chosen))].replace('_', '-')} is for runs that write answers: task=instruction")
    predictor = Answers(loaded, **chosen) if loaded.run.task.writes_answers else Outputs(loaded)
    size = given.batch or max(loaded.batch_size(), ROWS if loaded.transforms.option.reads_rows else 1)
    lines = sys.stdin.buffer if hasattr(sys.stdin, "buffer") else (line.encode() for line in sys.stdin)
    blocks, count = loaded.blocks_of(split, size) if split else inputs.given(given.paths, loaded.transforms, lines, size)
    with output(given.out) as write, Rate("prediction", count) as rate:
        unreadable, why = predict_all(predictor, blocks, size, write, rate, with_targets=split is not None)
    where = f": {given.out}" if given.out is not None else ""
    echo(f"{rate.text()}{where}", file=sys.stderr)
    for name, unknown in sum(loaded.transforms.unknown, Counter[str]()).items():
        echo(f"{unknown:,} rows have a value of {name} unknown in training: it counts as none", file=sys.stderr)
    if unreadable:
        more = f" and {unreadable - 1} more" if unreadable > 1 else ""
        echo(f"error: {unreadable} of the inputs have no answer: {why}{more}", file=sys.stderr)
    return FAILED if unreadable else DONE


evaluate = _of_run("evaluate", _evaluate, f"""\
drivetrain evaluate RUN [group=option] [key=value] …      the metrics of a finished run, as its own evaluation computes them

  drivetrain evaluate outputs/2026-11-21/07-37-57-4262f6
  drivetrain evaluate outputs/2026-11-21/07-37-57-4262f6 update=best --out best.json
  drivetrain evaluate outputs/2026-11-21/07-37-57-4262f6 split=validation
  drivetrain evaluate outputs/2026-11-21/07-37-57-4262f6 data=imagefolder data.root=~/other_photos
  drivetrain evaluate outputs/2026-11-21/07-37-57-4262f6 parallel=ddp runtime.device=cpu

  --out FILE            write the figures as JSON
  split=validation      the set that the run was selected by; default: split=test
{OF_CHOICE}

A folder that the run was not trained on, and that has no test/, is used whole; data.holdout=0.1 takes that share of it.
On the same set, with the run's own ranks, batch and device, the figures are those of training to the last digit.
""", {"--out": FILE}, ("split=validation",))  # fmt: skip

export = _of_run("export", _export, f"""\
drivetrain export RUN [FORMAT] [--out FILE] [key=value] …      a finished run as one file, to use without drivetrain

  drivetrain export outputs/2026-11-21/07-37-57-4262f6
  drivetrain export last                               the newest run below outputs/
  drivetrain export last --out best.safetensors update=best
  drivetrain export last onnx
  drivetrain export last --out model.pt2 --with-normalize

  --out FILE            the file to write, or just FILE; default: RUN/model, with the suffix of the format
  FORMAT                or --format FORMAT; default: by the suffix of FILE, else safetensors
                        safetensors (.safetensors): the weights, under the model's own names
                        torch.export (.pt2), onnx (.onnx), torchscript (.ts): the model, in float32, for any batch size
                        transformers: a folder that its from_pretrained reads, of a run with model=transformers
  --adapter             with --format transformers: only the adapter, in peft's form; else it is merged into the weights
  --with-normalize      the model normalises its inputs itself; else it takes normalised ones
{OF_CHOICE}

The file says in its metadata what is needed to use it: model, classes, shape and normalisation of the inputs. Before it is
kept, its output is compared with the model's. docs/export.md shows how to load each one.
""", {"--out": FILE, "--format": {}, "--with-normalize": FLAG, "--adapter": FLAG})  # fmt: skip

card = _of_run("card", _card, """\
drivetrain card RUN [--out FILE]      a model card of a finished run, as Hugging Face's hub shows it

  drivetrain card outputs/2026-11-21/07-37-57-4262f6
  drivetrain card outputs/2026-11-21/07-37-57-4262f6 --out model/README.md

  --out FILE            the file to write; default: RUN/README.md

It has the figures with their intervals, data, training, limits, and the recipe, from the run's own files. What only you
know, such as the licence, is marked to be filled in. `drivetrain export RUN FOLDER --format transformers` writes it into
its folder.
""", {"--out": FILE})  # fmt: skip

SPLITS = {"choices": ["test", "validation", "train"]}
predict = _of_run("predict", _predict, f"""\
drivetrain predict RUN INPUT … [--out FILE] [key=value] …      labels and probabilities of new inputs, a row for each

  drivetrain predict outputs/2026-11-21/07-37-57-4262f6 photo.jpg more_photos/ --out predictions.csv
  drivetrain predict outputs/2026-11-21/07-37-57-4262f6 arrays.npy --out predictions.parquet
  drivetrain predict outputs/2026-11-21/07-37-57-4262f6 houses.csv --out prices.csv
  find photos -name '*.jpg' | drivetrain predict outputs/2026-11-21/07-37-57-4262f6 - > predictions.csv
  drivetrain predict outputs/2026-11-21/07-37-57-4262f6 --data test --out predictions.csv

  INPUT                 image files; folders of them; arrays of samples as the data set has them (.npy, .npz, .pt);
                        tables (.csv, .tsv, .parquet, …) if the run reads tables; texts (.jsonl) if it reads texts;
                        - reads lines: paths of image files, a CSV, or texts, whichever the run reads
  --data test           the run's own test set (or validation, train), with a column of the right answers
  --out FILE            .csv, .jsonl or .parquet; default: CSV on standard output
  --max-tokens 256      of an answer at most, if the run writes answers (task=instruction); --temperature 0.7 draws instead of
                        taking the likeliest, --seed 1 draws others, --stop TEXT ends them before this text (may be repeated)
  --batch N             samples at a time; default: as in the run's evaluation, of tables at least 1,024
{OF_CHOICE}

Inputs are resized, encoded and normalised as in the run's evaluation. One that cannot be read gets a row with the reason.

exit codes: 0 done · 1 some inputs have no answer · 2 nothing was predicted
""", {
    "--out": FILE, "--data": SPLITS, "--batch": NUMBER, "--stop": {"action": "append"}, "--max-tokens": NUMBER,
    "--temperature": {"type": float}, "--seed": NUMBER,
})  # fmt: skip
