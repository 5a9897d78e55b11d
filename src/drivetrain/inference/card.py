"""`drivetrain card RUN`: a model card in the form of Hugging Face's hub, from the run's own files.

Text from outside stays text: it is written as code, and YAML quotes it in the front matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from drivetrain.core.errors import UserError
from drivetrain.core.machine import files
from drivetrain.core.typed import JsonMapping, fits, is_number
from drivetrain.run.reader import RunFiles
from drivetrain.run.result import Result
from drivetrain.saving import manifest
from drivetrain.ui.output import plain, writing
from drivetrain.ui.pages import run_table
from drivetrain.ui.sheet import sentence, setting
from drivetrain.ui.terminal import duration, number

Row = tuple[str, float, str, str]  # metric, value, set, and the 95 % interval of a share of samples
FILL_IN = "*To fill in:*"
SHOWN = 20  # names of classes, or of columns
# (targets, inputs) → the hub's name of the task.
TASKS = {
    ("class", "image"): "image-classification", ("labels", "image"): "image-classification",
    ("mask", "image"): "image-segmentation",
    ("class", "tokens"): "text-classification", ("tokens", "tokens"): "text-generation",
    ("class", "values"): "tabular-classification", ("values", "values"): "tabular-regression",
}  # fmt: skip
PREDICTS = {
    "class": "one of {} classes", "labels": "which of {} labels hold", "values": "{} number{s}",
    "mask": "a class of {} for each pixel",
    "tokens": "the next of {} tokens", "pair": "an embedding of {} numbers",
    "sequence": "a sequence of {} classes, the blank among them",
}  # fmt: skip
SAID = ("model", "optimizer", "optimizer.lr", "scheduler", "loss", "batch.global_batch", "epochs", "precision", "augment", "ema")
CARD = f"""\
---
{{front}}
---

# {{name}}

{{verdict}}

## Intended use

{{takes}}{FILL_IN} who should use it, for what, and what it must not be used for.

```
{{use}}
```

## Training data

{{data}}.

{FILL_IN} where the data comes from, its licence, and whom or what it leaves out.

## Training

{{settings}}
{{took}}.

## Results

{{results}}
Models were selected by the validation set, where there is one, and never by the test set.

## Limits

{{remarks}}- It was measured on this test set alone. On data of another origin it may do worse.

{FILL_IN} for whom or what it does worse, which was not measured, and what follows from a mistake.

## Licence

{FILL_IN} the licence of these weights, here and in `license` above (https://hf.co/docs/hub/repositories-licenses).

## Recipe

Versions: {{versions}}.

`drivetrain train recipe=recipe.yaml` trains it again with this file.
A recipe has no paths: add those of the data, such as `data.root=FOLDER`.

{{recipe}}
"""


def write(run: RunFiles, path: Path) -> Path:
    """Write the card of a run; return its path. Raises UserError."""
    if not run.path.is_dir():
        raise UserError(f"{run.path} is no run's directory: name one such as outputs/<date>/<time>-<id>")
    if run.result is None:
        raise UserError(f"{run.path} has no result.json: a card needs a run that has ended")
    with writing(path):
        files.write_text(path, text(run))
    return path


def text(run: RunFiles, library: str = "drivetrain", base: str | None = None, use: Sequence[str] = ()) -> str:
    """The card of a model for this library; `base` is the hub's name of its initial model, `use` the code that loads it."""
    result = run.result
    assert result is not None
    checkpoint, _ = manifest.newest_valid(run.path)
    about = manifest.about(checkpoint) if checkpoint is not None else {}
    rows, data = list(_results(result)), str(run.config.get("data", "unknown"))
    name = f"{run.config.get('model', 'model')}-{_data_set(run) or run.config.get('data', 'data')}"
    local, versions = run.environment.get("machine_local") or {}, run.environment.get("versions") or {}
    keys = [key for key in dict.fromkeys((*SAID, *run.changed)) if key in run.config and key not in local]
    energy = f", {result.energy_joules:,.0f} J of its GPUs" if result.energy_joules else ""
    took = f"{result.passes}, {result.updates:,} updates, {duration(result.wall_s)} on {result.world_size} × "
    of_data = result.data or {}
    samples = f", {of_data['samples']:,} samples" if is_number(of_data.get("samples")) else ""
    where = f", read from {code(_data_set(run))}" if _data_set(run) else ""
    mark = f"; the fingerprint of its {code(of_data.get('of'))} is {code(of_data['hash'])}" if of_data.get("hash") else ""
    recipe = run.path / "recipe.yaml"
    lines = plain(files.read_text(recipe)).splitlines() if recipe.is_file() else []
    cells = [[code(metric), of_set, number(value), interval] for metric, value, of_set, interval in rows]
    return CARD.format(
        front=_front(run, about, library, base, name, rows), name=code(name), verdict=prose(sentence(run_table.verdict([run]))),
        takes=_takes(run, about), use="\n".join(use or ["drivetrain predict RUN FILE"]),
        data=f"{code('data=' + data)}{where}{samples}{mark}",
        settings=_table(["setting", "value"], [[code(key), code(setting(run.config[key], "null"))] for key in keys]),
        took=f"{took}{code(result.device_name or result.device)}{energy}",
        results=_table(["metric", "set", "value", "95 % interval"], cells),
        remarks="".join(f"- {prose(sentence(remark))}\n" for remark in result.remarks),
        versions=", ".join(
            code(f"{of} {value}") for of, value in {"drivetrain": run.environment.get("drivetrain"), **versions}.items() if value
        ),
        # Its comments name machine-local values. An indented line is always code.
        recipe="\n".join(f"    {line}" for line in lines if not line.lstrip().startswith("#")),
    )  # fmt: skip


def _front(run: RunFiles, about: JsonMapping, library: str, base: str | None, name: str, rows: Sequence[Row]) -> str:
    """The card's front matter, which the hub reads."""
    kind = "tokens" if about.get("vocabulary") else "image" if len(about.get("shape") or []) == 3 else "values"
    task, option = TASKS.get((str(about.get("targets")), kind)), str(run.config.get("data", "unknown"))
    tested = {metric: value for metric, value, of_set, _ in rows if of_set == "test"}
    listed = [{"type": metric, "value": value, "name": f"{metric} on the test set"} for metric, value in tested.items()]
    data = {"name": _data_set(run) or option, "type": option, "split": "test"}
    index = {"task": {"type": task or "other"}, "dataset": data, "metrics": listed}
    head = {
        "library_name": library, "license": "unknown", **({"pipeline_tag": task} if task else {}),
        **({"base_model": base} if base else {}), "tags": ["drivetrain"],
        **({"model-index": [{"name": name, "results": [index]}]} if listed else {}),
    }  # fmt: skip
    return str(yaml.safe_dump(head, sort_keys=False, allow_unicode=True)).strip()


def _takes(run: RunFiles, about: JsonMapping) -> str:
    """The sentence on the model's inputs and outputs; "" if unknown."""
    outputs, shape, predicts = about.get("outputs"), about.get("shape"), PREDICTS.get(str(about.get("targets")))
    if not predicts or not outputs:
        return ""
    names, columns = _listed(about.get("classes") or []), _columns(run)
    takes = f"inputs of the shape {code(shape)}" if shape else "inputs"
    takes = f"the column{'s' * (len(columns) != 1)} {_listed(columns)}" if columns else takes
    gives = predicts.format(outputs, s="s" * (outputs != 1))
    return f"It takes {takes} and gives {gives}{': ' * bool(names)}{names}.\n\n"


def _data_set(run: RunFiles) -> str:
    """The name of the data's folder or file, without its path on this machine; "" without one."""
    local = run.environment.get("machine_local")
    given = [local.get(key) for key in ("data.path", "data.root")] if isinstance(local, dict) else []
    return next((Path(place).name for place in given if isinstance(place, str)), "")


def _columns(run: RunFiles) -> list[str]:
    """The input columns of a model of tables; [] for other models."""
    with suppress(OSError, ValueError):
        found = files.read_json(run.path / "table.json")
        return found["inputs"] if isinstance(found, dict) and fits(found.get("inputs"), list[str]) else []
    return []


def _listed(names: Sequence[str]) -> str:
    """Names as code, the first ones of many."""
    return ", ".join(map(code, names[:SHOWN])) + ", …" * (len(names) > SHOWN)


def code(said: object) -> str:
    """A text as code on one line, without any markup, even within a table."""
    return f"`{' '.join(plain(str(said)).split()).replace('`', chr(39)).replace('|', '¦')}`"


def prose(said: str) -> str:
    """A text on one line, without any markup."""
    return re.sub(r"[\\`*_{}\[\]<>#|!&~]", r"\\\g<0>", " ".join(plain(said).split()))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, ["---"] * len(header), *rows)) if rows else ""


def _results(result: Result) -> Iterator[Row]:
    """Yield metric, value, set and the 95 % interval of a share of samples: of the best evaluation, the test set first."""
    for of_set in sorted(result.metrics, key=lambda of: of != "test"):
        evaluations = result.metrics[of_set]
        for name, value in (evaluations.get("best") or evaluations.get("final") or {}).items():
            if name != "update" and is_number(value):
                found = result.interval(of_set, name, value)
                told = f"{found[0]:.4f} to {found[1]:.4f} ({result.shares[name]:,} samples)" if found else "–"
                yield name, value, of_set, told
