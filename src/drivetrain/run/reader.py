"""Read the files of runs: completed, failed and running ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from drivetrain.config.composed import flatten
from drivetrain.core.errors import UserError, refuse
from drivetrain.core.machine import files
from drivetrain.core.machine.paths import expanded
from drivetrain.core.options.selection import Reach, Selection, handed_on
from drivetrain.core.typed import JsonObject, fits, is_number
from drivetrain.run import directory, records
from drivetrain.run.records import need_pandas
from drivetrain.run.result import Result

DEEPEST = 20  # folders between the named one and a run's
MAX_VALUES, MAX_DEPTH = 100_000, 30  # keys in a run's config or environment
# The keys read from environment.json, with their types.
ENVIRONMENT: JsonObject = {
    "time": float, "selection": dict[str, str] | None, "overrides": list[str], "versions": dict[str, str | None],
    "git_commit": str | None,
}  # fmt: skip
NOT_COMPARED = ("output_dir", "resume", "resume_changed", "recipe", "trust")


@dataclass
class Points:
    """The records of one kind, as parallel lists."""

    updates: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # since the run's first record
    values: list[dict[str, float]] = field(default_factory=list)
    set: str = "test"  # the evaluated set

    def curve(self, name: str) -> list[float | None]:
        """The value of this name in each record; None where it is missing."""
        return [v.get(name) for v in self.values]


@dataclass
class RunFiles:
    """The content of one run's directory."""

    path: Path
    label: str
    result: Result | None
    status: str  # as in result.json; without one "running" while the directory is locked, else "killed"
    config: JsonObject  # dotted keys
    environment: JsonObject
    train: Points
    evaluated: Points  # on the validation set, or on the test set without one
    changed: JsonObject = field(default_factory=dict)  # the run's differences from the defaults; dotted keys
    counts_start: bool = True  # True if the seconds to a target are the run's own, from the start of its process

    @cached_property
    def selection(self) -> Selection | None:
        """The metric that ranks the run's models; None before the first evaluation."""
        recorded = (self.result.selection if self.result else None) or self.environment.get("selection")
        return Selection.of(recorded) if self.evaluated.values else None

    @property
    def metric(self) -> tuple[str, bool] | None:
        """The metric for comparison with other runs: of the resulting weights, and whether higher is better."""
        return (self.selection.across_runs.name, self.selection.maximize) if self.selection is not None else None

    def place(self) -> tuple[float, float] | None:
        """The sort key of the best evaluation among runs with the same metric, lowest first."""
        places = map(self.selection.place, self.evaluated.values) if self.selection is not None else ()
        return min((place for place in places if place is not None), default=None)

    def best(self) -> float | None:
        """The metric's best value."""
        place = self.place()
        return self.selection.value(place) if self.selection is not None and place is not None else None

    def final(self) -> float | None:
        """The metric's last value."""
        return self.evaluated.values[-1].get(self.selection.name) if self.selection else None

    def rates(self) -> list[float]:
        """Samples per second between logged updates, sorted."""
        return sorted(r for r in self.train.curve("samples_per_second")[1:] if r)  # the first one includes the warm-up

    def to_target(self, target: float | Reach) -> tuple[float, int] | None:
        """Seconds and updates until the metric reached `target`; None if it never did. A number is of the run's own metric.

        The seconds to the run's own target are its own note, from the start of its process. For another target they count from
        the first record, because nothing else is known.
        """
        if isinstance(target, Reach):
            return self.noted(target) or self.first_reaching(target.metric, target.reached)
        if self.metric is None:
            return None
        name, more = self.metric
        return self.first_reaching(name, lambda value: value >= target if more else value <= target)

    def noted(self, target: Reach) -> tuple[float, int] | None:
        """Seconds and updates until the run's own target, as noted by the run; None for another `target` or an unreached one."""
        own = (self.result.target if self.result and self.counts_start else None) or {}
        if own.get("reach") != str(target) or own.get("update") is None or own.get("seconds") is None:
            return None
        return own["seconds"], own["update"]

    def first_reaching(self, name: str, good: Callable[[float], bool]) -> tuple[float, int] | None:
        """Seconds and updates until an evaluation gave a good value of a figure; None if none did."""
        each = map(handed_on, self.evaluated.values)
        for seconds, update, values in zip(self.evaluated.seconds, self.evaluated.updates, each, strict=True):
            if name in values and good(values[name]):
                return seconds, update
        return None


def put_on_one_clock(runs: Sequence[RunFiles], target: Reach) -> bool:
    """Count the seconds to a target from each run's first record, if only some of the runs that reached it have noted it.

    Returns True if all already counted in one way.
    """
    noted = {run.noted(target) is not None for run in runs if run.to_target(target) is not None}
    for run in runs:
        run.counts_start = len(noted) < 2
    return len(noted) < 2


def find(folders: Sequence[Path]) -> list[RunFiles]:
    """The runs in these folders and below, the oldest first. Raises UserError for a folder that is missing or without a run."""
    problems = [f"{folder}: there is no such folder" for folder in folders if not folder.is_dir()]
    refuse(problems)
    places = sorted({place for folder in folders for place in _places(folder)})
    if not places:
        raise UserError(f"no run in {', '.join(map(str, folders))}: a run's folder holds environment.json or result.json")
    return sorted((read(place) for place in places), key=lambda run: run.environment.get("time", 0.0))


def _places(top: Path) -> Iterator[Path]:
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            names = {entry.name for entry in folder.iterdir()}
        except OSError:  # unreadable, or its path is too long
            continue
        if names & {"environment.json", "result.json"}:
            yield folder
        elif len(folder.parts) - len(top.parts) < DEEPEST:
            waiting += [folder / name for name in names if (folder / name).is_dir() and not (folder / name).is_symlink()]


def compared(tree: dict[str, object], chosen: dict[str, object]) -> JsonObject:
    """The comparable part of a config: its values by dotted keys, and the chosen options."""
    config = {k: v for k, v in flatten(tree).items() if k and k.split(".")[0] not in NOT_COMPARED and not k.endswith("_target_")}
    return {**config, **chosen} if config else {}


def read(path: Path, known: tuple[JsonObject, JsonObject] | None = None) -> RunFiles:
    """Read a run's directory; any of its files may be missing. `known`: its config and changes, if known."""
    result = Result.read(path)
    environment = {k: v for k, v in _bounded(_json(path / "environment.json")).items() if fits(v, ENVIRONMENT.get(k, object))}
    config, changed = known or _read_config(path)
    spoilt = result is None and (path / "result.json").exists()
    status = result.status if result else "running" if directory.is_locked(path) else "unreadable" if spoilt else "killed"
    train, evaluated = points(path / "metrics.jsonl")
    words = result.overrides if result else environment.get("overrides", [])
    label = " ".join(w for w in words if not w.startswith(("output_dir=", "logger="))) or "default"
    return RunFiles(path, label, result, status, config, environment, train, evaluated, changed)


def _read_config(path: Path) -> tuple[JsonObject, JsonObject]:
    recipe = _bounded(_yaml(path / "recipe.yaml"))
    changed = _choices(recipe)
    config = compared(_bounded(_yaml(path / "config.yaml")), {**_choices(recipe.get("unchanged")), **changed})
    return config, changed | {k: v for k, v in flatten(recipe).items() if k in config and k not in changed}


def _choices(part: object) -> JsonObject:
    """The options chosen in a part of a recipe, by group."""
    lines = part.get("defaults") if isinstance(part, dict) else None
    found = [line for line in lines if isinstance(line, dict)] if isinstance(lines, list) else []
    return {str(k).rpartition("/")[2]: v for line in found for k, v in line.items()}


def _bounded(tree: object) -> JsonObject:
    """Return a mapping with text keys; {} for anything else or a too large one: YAML aliases can hold billions of values."""
    left, waiting = MAX_VALUES, [(tree, 0)]
    while waiting:
        value, depth = waiting.pop()
        inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        left -= 1 + len(inside)
        if left < 0 or depth > MAX_DEPTH:
            return {}
        waiting += [(item, depth + 1) for item in inside]
    return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}


def _yaml(path: Path) -> JsonObject:
    try:
        return files.read_yaml(path) or {}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _json(path: Path) -> JsonObject:
    try:
        found = files.read_json(path, files.MB)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def points(path: Path) -> tuple[Points, Points]:
    """The training and the evaluation records of metrics.jsonl. Seconds count from the first, without the pause of a resume."""
    train, evaluated = Points(), Points()
    began, last, samples = None, None, 0
    for record in records.read(path).records:
        event, update = record.pop("event", None), record.pop("update", 0)
        seconds = record.pop("time", None)
        began = seconds if began is None else began
        if event == "resume" and None not in (seconds, last, began):
            began += seconds - last
        last = seconds if seconds is not None else last
        samples = record.pop("samples", samples)
        if event == "evaluate" and "weights" in record:  # at the run's end: the test set, never used for selection
            continue
        points = train if event == "train" else evaluated if event == "evaluate" else None
        if points is None:
            continue
        points.set = str(record.get("set", points.set))
        points.updates.append(update)
        points.samples.append(samples)
        points.seconds.append(seconds - began if seconds is not None and began is not None else 0.0)
        points.values.append({k: v for k, v in record.items() if k != "epoch" and is_number(v)})
    return train, evaluated


def differing(runs: Sequence[RunFiles]) -> list[str]:
    """The config's keys in which the runs differ. If a group's option differs, the group is returned instead of its keys."""
    configs = [run.config for run in runs if run.config]
    keys = dict.fromkeys(k for config in configs for k in config)
    differ = [k for k in keys if len({str(config.get(k, "–")) for config in configs}) > 1]
    groups = tuple(f"{k}." for k in differ if "." not in k)
    return [k for k in differ if "." not in k or not k.startswith(groups) or all(k in config for config in configs)]


TIMES = ("samples_per_second", "step_ms_p50", "step_ms_p95", "data_wait_fraction", "mfu", "peak_memory_bytes", "wall_s")


def as_frame(folder: Path | str) -> Any:
    """The runs in a folder and below, the oldest first: a row for each, with its settings, metrics and times.

    Settings are those in which the runs differ. Metrics are `<set>.final.<name>` and `<set>.best.<name>`, such as
    `validation.best.accuracy` and `test.best.accuracy`. Raises UserError without a run, or without pandas.
    """
    pandas = need_pandas("drivetrain.runs")
    runs = find([expanded(folder)])
    settings = differing(runs)
    return pandas.DataFrame([dict(_row(run, settings)) for run in runs])


def _row(run: RunFiles, settings: list[str]) -> Iterator[tuple[str, object]]:
    yield "run", str(run.path)
    yield "status", run.status
    yield "overrides", run.label
    for key in settings:
        value = run.config.get(key)
        yield key, tuple(value) if isinstance(value, list) else value  # a tuple can be grouped by
    result = run.result
    for of_set, evaluations in (result.metrics if result is not None else {}).items():
        for when, metrics in evaluations.items():
            for name, value in metrics.items():
                yield f"{of_set}.{when}.{name}", value
    if result is None and run.evaluated.values:  # still running, or killed
        for name, value in run.evaluated.values[-1].items():
            yield f"{run.evaluated.set}.final.{name}", value
    yield "updates", result.updates if result is not None else run.train.updates[-1] if run.train.updates else 0
    for name in TIMES:
        yield name, getattr(result, name) if result is not None else None
    yield "error", result.error if result is not None else None
