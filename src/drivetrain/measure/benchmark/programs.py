"""`drivetrain compare --program`: any unchanged program, with other arguments or at other revisions of its code."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from drivetrain.core.errors import DONE, FAILED, UserError, refuse
from drivetrain.core.machine import files, process
from drivetrain.core.options.option import Effect
from drivetrain.core.typed import JsonObject
from drivetrain.measure import verbs
from drivetrain.measure.benchmark.figures import FigureSource, Pick, Unmeasured, last_of, lines_of
from drivetrain.measure.benchmark.quality import (
    ALPHA,
    BETTER,
    FAIL,
    PASS,
    WORSE,
    Asks,
    JudgedFigure,
    QualitySettings,
    Trial,
    sequentially,
)
from drivetrain.measure.benchmark.variants import TrainedRun
from drivetrain.measure.intervals import MIN_PAIRS, Interval, deviation, ratio
from drivetrain.run import directory
from drivetrain.ui import sheet
from drivetrain.ui.progress import Steps
from drivetrain.ui.terminal import duration

NOT_AS_GOOD, UNDECIDED = 4, 5  # exit codes
OF_SHELL = {"&&", "||", "|", ";", ">", ">>", "<", "2>&1", "&"}
MOST_OUTPUT = 64 * files.MB  # most bytes read of a program's output
WAITED = 0.1  # share of a run's time spent waiting for a core that marks the machine as busy


@dataclass
class Program:
    """A compared program: a command to run with seeds, in a folder."""

    label: str
    command: Sequence[str]  # with {seed}, {out} and {code}
    metrics: Sequence[FigureSource]  # the first one decides
    cwd: Path
    place: Path  # for a folder of each run
    code: Path  # the checkout or worktree
    checkout: Path | None = None  # the repository of the worktree `code`
    limit_s: float | None = None
    seconds: dict[int, float] = field(default_factory=dict)  # by seed
    notes: list[str] = field(default_factory=list)

    def run(self, seed: int) -> TrainedRun:
        """Run it with a seed to its end; all processes that it started are ended."""
        out = self.place / f"seed-{seed}"
        out.mkdir(parents=True)
        command = [word.format_map(_Slots(seed=str(seed), out=str(out), code=str(self.code))) for word in self.command]
        began, clock, waited = process.now(), time.monotonic(), _waited_s()
        with open(out / "output.txt", "wb") as output:
            try:
                started = subprocess.Popen(
                    command, cwd=self.cwd, env={**os.environ, "PYTHONUNBUFFERED": "1"}, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                return TrainedRun(seed, 0, error=f"{command[0]} cannot be started: {error.strerror}")
            try:
                code: int | None = started.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)
                started.wait()
        self.seconds[seed] = time.monotonic() - clock
        if _waited_s() - waited > WAITED * self.seconds[seed]:
            self._note("measured on a busy machine: its times say little")
        text = (out / "output.txt").read_bytes()[-MOST_OUTPUT:].decode(errors="replace")
        if code is None:
            return TrainedRun(seed, 0, error=f"it took more than --limit {self.limit_s:g}s")
        if code:
            return TrainedRun(seed, 0, error=f"exit code {code}: {last_of(lines_of(text))[-1]}")
        if self.checkout is not None and f"{self.checkout}{os.sep}" in text.replace(f"{self.code}{os.sep}", ""):
            self._note(
                f"its output names files of {self.checkout}: is the package installed from there? env PYTHONPATH={{code}}/src …"
            )
        try:
            values = {
                metric.given: metric.read(text, self.cwd, out, began - 2) for metric in self.metrics
            }  # a file system's clock
        except (Unmeasured, OSError) as error:
            return TrainedRun(seed, 0, error=str(error))
        for metric in self.metrics:
            if values[metric.given][1] > 1:
                self._note(f"{metric.name} has several values in a run: the {metric.pick} one counts (--pick)")
        return TrainedRun(seed, 0, {given: value for given, (value, _) in values.items()})

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


class _Slots(dict[str, str]):
    """The names that a command may have in braces; others stay unchanged."""

    def __missing__(self, key: str) -> str:
        return f"{{{key}}}"


def _waited_s() -> float:
    """The seconds that the processes of this user's machine have waited for a core, as counted by Linux; 0 elsewhere."""
    try:
        some = files.read_text(Path("/proc/pressure/cpu")).split("total=")[1].split()[0]
        return int(some) / 1e6
    except (OSError, IndexError, ValueError):
        return 0.0


def _git(*command: str, cwd: Path) -> str:
    """The output of git. Raises UserError."""
    done = subprocess.run(["git", *command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"git {command[0]}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout.strip()


def _is_commit(revision: str, top: Path) -> bool:
    command = ["git", "rev-parse", "--quiet", "--verify", f"{revision}^{{commit}}"]
    return subprocess.run(command, cwd=top, capture_output=True, check=False).returncode == 0


@contextmanager
def worktrees(revisions: Sequence[str], folder: Path, notes: list[str]) -> Iterator[list[Path]]:
    """A worktree for each revision, removed at the end; this one does not change. Raises UserError."""
    top = Path(_git("rev-parse", "--show-toplevel", cwd=Path.cwd()))
    refuse(f"--code {name}: git knows no such revision" for name in revisions if not _is_commit(name, top))
    commits = [_git("rev-parse", f"{revision}^{{commit}}", cwd=top) for revision in revisions]
    if changed := _git("status", "--porcelain", cwd=top).splitlines():
        notes.append(f"{len(changed)} changes that are not committed are in neither revision, the first is {changed[0][3:]}")
    ignored = [line[3:] for line in _git("status", "--porcelain", "--ignored", cwd=top).splitlines() if line.startswith("!!")]
    if missing := [name for name in ignored if "__pycache__" not in name and name.rstrip("/") not in (".venv", "outputs")]:
        notes.append(f"git ignores {', '.join(missing[:5])}: no worktree has them")
    places = [folder / f"code-{number}" for number in range(len(commits))]
    try:
        for place, commit in zip(places, commits, strict=True):
            _git("worktree", "add", "--detach", str(place), commit, cwd=top)
        yield places
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        _git("worktree", "prune", cwd=top)


@dataclass
class Options:
    """The verb's options for comparing programs."""

    program: str | None = None
    variant: Sequence[str] = ()
    code: Sequence[str] = ()
    metric: str | None = None
    higher: bool = False
    lower: bool = False
    pick: Pick = "last"
    asks: Asks = "better"
    budget: str | None = None
    limit: str | None = None
    ledger: Path | None = None
    holdout_metric: str | None = None

    @property
    def given(self) -> bool:
        """True if programs are to be compared."""
        return self.program is not None or bool(self.code)

    def problems(self) -> Iterator[str]:
        """Yield the problems of the options."""
        template = shlex.split(self.program or "")
        if not self.metric:
            yield (
                r"--metric is missing: a pattern of the output with brackets around the number, as 'val_acc: ([\d.]+)', or "
                "FILE.json:key"
            )
        if self.higher == self.lower:
            yield "say --higher where more of the metric is better, or --lower"
        if "{seed}" not in (self.program or ""):
            yield (
                "--program has no {seed}: without seeds no difference can be told from chance. Where a program takes none, give "
                "it by its environment, as 'env SEED={seed} python train.py'"
            )
        if self.variant and "{variant}" not in (self.program or ""):
            yield "--program has no {variant}, where the words of --variant go"
        if max(1, len(self.variant)) * max(1, len(self.code)) < 2:
            yield "there is nothing to compare: give --variant twice, or --code twice"
        if wrong := [word for word in template if word in OF_SHELL]:
            yield f"--program is run by no shell, and {wrong[0]} has no effect: write \"bash -c '…'\""
        for option, text in (("--budget", self.budget), ("--limit", self.limit)):
            if text is not None and verbs.seconds(text) is None:
                yield f"{option} {text} is no time: give one such as 90s, 30m or 2h"
        for option, text in (("--metric", self.metric), ("--holdout-metric", self.holdout_metric)):
            if text:
                yield from FigureSource(text, self.higher).problems(option)


def of_own_run(options: Options, overrides: Sequence[str], config_dirs: Sequence[str]) -> Options:
    """The options that compare a drivetrain run of these overrides, at several revisions of its code. Raises UserError."""
    from drivetrain.core.options.selection import selected
    from drivetrain.data.base import Data
    from drivetrain.launch.job import prepare

    chosen = prepare(overrides, config_dirs).run
    metric, of_set = selected(chosen).across_runs, "test" if Data.of(chosen).validation is None else "validation"
    folders = [word for folder in config_dirs for word in ("--config-dir", str(folder))]
    train = shlex.join([*process.command("drivetrain"), "train", "-q", *folders, *overrides])
    top = Path(_git("rev-parse", "--show-toplevel", cwd=Path.cwd()))
    others = [Path(each) for each in process.import_path().split(os.pathsep)]  # without the checkout's modules
    found = [str(each) for each in others if not each.is_relative_to(top) or "site-packages" in each.parts]
    path = os.pathsep.join(["{code}", "{code}/src", *found])
    program = f"env {shlex.quote(f'PYTHONPATH={path}')} {train} runtime.seed={{seed}} output_dir={{out}}"
    given = f"{{out}}/*/*/result.json:metrics.{of_set}.final.{metric.name}"
    return replace(options, program=program, metric=given, higher=metric.maximize, lower=not metric.maximize)


@dataclass
class Compared:
    """The results of programs: the first one's runs, the others' verdicts, and remarks."""

    programs: Sequence[Program]
    trial: Trial
    base: Sequence[TrainedRun]
    metric: FigureSource
    notes: Sequence[str]
    alpha: float

    @property
    def error(self) -> str | None:
        """The reason why the first program has no figure; None if it has one."""
        return next((run.error for run in self.base if run.error), None)

    @property
    def kept(self) -> int | None:
        """The number of the best variant that is certainly better."""
        means = {
            n: sum(run.figures[self.metric.given] for run in verdict.runs) / len(verdict.runs)
            for n, verdict in self.trial.verdicts.items()
            if verdict.differs == BETTER
        }
        return (max if self.metric.higher else min)(means, key=lambda n: means[n]) if means else None

    @property
    def code(self) -> int:
        """The exit code: 0 better or as good, 4 worse, 5 undecided, 1 where the first program failed."""
        if self.error:
            return FAILED
        verdicts = list(self.trial.verdicts.values())
        good = self.kept is not None if self.trial.asks == "better" else all(each.outcome == PASS for each in verdicts)
        bad = [each for each in verdicts if each.outcome == FAIL or each.differs == WORSE]
        return DONE if good else NOT_AS_GOOD if (len(bad) == len(verdicts) if self.trial.asks == "better" else bad) else UNDECIDED

    def speed(self, number: int) -> Interval | None:
        """The speed of a variant relative to the first, over runs of the same seeds; None without any."""
        ours, first = self.programs[number].seconds, self.programs[0].seconds
        seeds = sorted(ours.keys() & first.keys())
        return ratio([first[seed] for seed in seeds], [ours[seed] for seed in seeds]) if len(seeds) >= MIN_PAIRS else None

    def answer(self) -> str:
        """The verdict on each variant in a line."""
        if self.error:
            return f"{self.programs[0].label} failed, and the others were not judged: {self.error}"
        said = []
        for number, verdict in self.trial.verdicts.items():
            differs = {BETTER: "BETTER", WORSE: "WORSE"}.get(verdict.differs or "", "not known to differ")
            reason = verdict.reason.removeprefix(f"{verdict.differs}; ").replace(f"{self.metric.given} ", "")
            said.append(f"{self.programs[number].label}: {differs}, as good: {verdict.outcome}; {reason}")
        return "; ".join(said)

    def sheet(self) -> sheet.Sheet:
        """The page: the verdicts, the programs' figures, and remarks on them."""
        rows: list[list[str]] = []
        for number, program in enumerate(self.programs):
            verdict = self.trial.verdicts.get(number)
            runs = verdict.runs if verdict is not None else self.base
            values = [run.figures[self.metric.given] for run in runs if not run.error]
            spread = f" ± {deviation(values):.2g}" if len(values) > 1 else ""
            found = f"{sum(values) / len(values):.5g}{spread}" if values else "–"
            taken = list(program.seconds.values())
            fast = self.speed(number) if number else None
            differs, outcome = (verdict.differs or "not known", verdict.outcome) if verdict is not None else ("first", "")
            a_run = duration(sum(taken) / len(taken)) if taken else "–"
            rows.append([program.label, found, differs, outcome, str(len(runs)), a_run, fast.as_fast() if fast else ""])
        header = ["program", f"{self.metric.name} ± deviation", "differs", "as good", "seeds", "a run", "speed"]
        return sheet.Sheet(
            "Programs compared – drivetrain compare",
            self.answer(),
            [sheet.Table(header, rows, "The programs"), sheet.words(*self.notes)],
        )

    def as_dict(self) -> JsonObject:
        """The verdicts and all runs."""
        of_first = [asdict(run) for run in self.base]
        programs = [{"label": each.label, "command": list(each.command), "seconds": each.seconds} for each in self.programs]
        verdicts = {self.programs[n].label: asdict(verdict) for n, verdict in self.trial.verdicts.items()}
        return {
            "metric": asdict(self.metric), "alpha": self.alpha, "programs": programs, "first": of_first, "verdicts": verdicts,
            "notes": list(self.notes), "exit_code": self.code,
        }  # fmt: skip


def run(options: Options, plan: QualitySettings, argv: Sequence[str]) -> Compared:
    """Run the programs in turns until each variant is decided, or seeds or time end. Raises UserError before the first run."""
    refuse(options.problems())
    given = filter(None, (options.metric, options.holdout_metric))
    metric, *held = metrics = [FigureSource(each, options.higher, options.pick) for each in given]
    tries = _tries(options.ledger)
    alpha = ALPHA / ((tries + 1) * (tries + 2)) if options.ledger is not None else ALPHA
    budget, began, notes = verbs.seconds(options.budget or ""), time.monotonic(), list[str]()
    with ExitStack() as stack, Steps() as progress:
        folder = stack.enter_context(directory.temporary())
        programs = list(_programs(options, metrics, folder, stack, notes))
        numbers = range(1, len(programs))
        claims: dict[int, tuple[Effect, list[str]]] = {n: ("changes", []) for n in numbers}
        figures = {n: [JudgedFigure(metric.given, -1.0 if metric.higher else 1.0)] for n in numbers}
        trial = Trial.of(metric.given, claims, figures, options.asks, plan.margin, alpha)

        def train(variant: int, number: int) -> TrainedRun:
            if failed := next((each.error for each in first if each.error), None):
                return TrainedRun(number, 0, error=failed if not variant else "the first program failed")
            progress(f"seed {number} of {programs[variant].label}")
            done = programs[variant].run(number)
            first.extend([done] if not variant else [])
            return done

        first: list[TrainedRun] = []
        plan.quality_s = budget
        base = sequentially(trial, plan, train)
        if budget is not None and time.monotonic() - began > budget and len(base) < plan.max_seeds:
            notes.append(f"--budget {options.budget} was spent after {len(base)} seeds of each")
        done = Compared(programs, trial, base, metric, notes, alpha)
        said = {note: [each.label for each in programs if note in each.notes] for each in programs for note in each.notes}
        notes += [note if len(labels) == len(programs) else f"{', '.join(labels)}: {note}" for note, labels in said.items()]
        values = {each.figures[metric.given] for each in base if not each.error}
        if len(base) > 1 and len(values) == 1:
            notes.append(
                f"{metric.name} of {programs[0].label} is {values.pop():g} with each of {len(base)} seeds: it does not depend on "
                "the seed, or {seed} does not reach it, and a difference says nothing of other seeds"
            )
        notes += _held_out(done, held)
    if options.ledger is not None:
        notes.append(
            f"try {tries + 1} of {options.ledger}: decided at a level of {100 * alpha:.2g} %, so that all together spend 5 %"
        )
        _note_try(options.ledger, done, argv)
    return done


def _programs(
    options: Options, metrics: Sequence[FigureSource], folder: Path, stack: ExitStack, notes: list[str]
) -> Iterator[Program]:
    """Each revision with each variant."""
    here, limit_s = Path.cwd(), verbs.seconds(options.limit or "")
    places = stack.enter_context(worktrees(options.code, folder, notes)) if options.code else [here]
    top = Path(_git("rev-parse", "--show-toplevel", cwd=here)) if options.code else None
    for name, place in zip(options.code or [""], places, strict=True):
        cwd = place / here.relative_to(top) if top is not None else here
        if not cwd.is_dir():
            raise UserError(f"--code {name} has no folder {here.relative_to(top or here)}, where the program is to run")
        for number, variant in enumerate(options.variant or [""]):
            label = " ".join(filter(None, (name, variant))) or "as it is"
            command = [each for word in shlex.split(str(options.program)) for each in _filled(word, variant)]
            yield Program(label, command, metrics, cwd, folder / f"{place.name}-{number}", place, top, limit_s)


def _filled(word: str, variant: str) -> list[str]:
    """A word of the command with a variant's words filled in."""
    return shlex.split(variant) if word == "{variant}" else [word.replace("{variant}", variant)]


def _held_out(done: Compared, held: Sequence[FigureSource]) -> Iterator[str]:
    """The figure on data that influenced no choice, read if a variant is kept."""
    for metric in held:
        if (kept := done.kept) is None:
            yield f"{metric.name} was not looked at: no variant is kept"
            continue
        for label, runs in ((done.programs[0].label, done.base), (done.programs[kept].label, done.trial.verdicts[kept].runs)):
            values = [run.figures[metric.given] for run in runs if not run.error]
            yield f"{metric.name} of {label}: {sum(values) / len(values):.5g} ± {deviation(values):.2g}"


def _tries(ledger: Path | None) -> int:
    """The number of comparisons in a ledger."""
    if ledger is None or not ledger.exists():
        return 0
    return sum(bool(line.strip()) for line in files.read_text(ledger).splitlines())


def _note_try(ledger: Path, done: Compared, argv: Sequence[str]) -> None:
    """Add a comparison to the ledger."""
    verdicts = {done.programs[n].label: [v.differs, v.outcome] for n, v in done.trial.verdicts.items()}
    line = {"time": process.now(), "command": list(argv), "metric": done.metric.given, "alpha": done.alpha, "verdicts": verdicts}
    with open(ledger, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def command(options: Options, given: Sequence[str], config_dirs: Sequence[str]) -> int:
    """Run `drivetrain compare --program` or `--code`; its exit code."""
    plan, rest = verbs.split(given, QualitySettings)
    rest = [word for word in rest if word != "quality=true"]
    if options.program is None:
        options = of_own_run(options, rest, config_dirs)
    else:
        refuse(f"'{word}' is no setting of compare --program, which has seeds=, max_seeds= and margin=" for word in rest)
    done = run(options, plan, sys.argv[2:])
    page = done.sheet()
    page.show()
    place = verbs.chosen() or directory.new(Path("outputs"), "compare")
    place.mkdir(parents=True, exist_ok=True)
    verbs.write(place, "compare", page, ["compare", *sys.argv[2:]], done.as_dict())
    return done.code
