"""`drivetrain compare`: techniques side by side, with intervals, and whether the result is still as good."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from drivetrain.core.errors import UserError
from drivetrain.launch.job import Job
from drivetrain.measure import verbs
from drivetrain.measure.benchmark import quality
from drivetrain.measure.benchmark.comparison import Comparison, Row, Settings, measure
from drivetrain.measure.benchmark.quality import FAIL, FIRST, PASS, Verdict, in_words
from drivetrain.measure.benchmark.training import columns as of_target
from drivetrain.measure.benchmark.training import proven
from drivetrain.measure.benchmark.variants import VariantSpec, baseline_job, refuse_bad, refuse_resume, swept
from drivetrain.measure.intervals import EQUIVALENCE, MIN_PAIRS
from drivetrain.ui.output import echo
from drivetrain.ui.pages import charts
from drivetrain.ui.pages.charts import Curve
from drivetrain.ui.sheet import Cell, Drawn, Part, Section, Sheet, Table, figure, folded, remarks, under, words

WIDTH, MARGIN = 160, 12  # of the drawing of an interval, in pixels
TICK_WIDTH = 34  # of a number on the scale, in pixels
IN_ALL_FIGURES = ("updates to it", "95th percentile", "seeds")
LEAST = ("waiting for data", "update, median", "memory", "samples/s", "starts in")  # what a narrow terminal leaves out
METHOD = (quality.__doc__ or "").split("\n\n")
AS_IT = ("as it is", "as it was")  # what the run that is to be made faster is called
TICKS = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)


def names(comparison: Comparison) -> list[str]:
    """A name for each variant: of the first one what not all have, of each other one what it has otherwise than the first."""
    labels = [row.label or "the first variant" for row in comparison.rows]
    words = [label.split() for label in labels]
    common = set(words[0]).intersection(*words[1:])
    left_out = [common, *[set(words[0])] * (len(words) - 1)]
    short = [
        " ".join(word for word in each if word not in out) or label
        for each, out, label in zip(words, left_out, labels, strict=True)
    ]
    return short if len(set(short)) == len(short) else labels


def winner(comparison: Comparison) -> int | None:
    """The number of the variant that is the answer, if one is certain: the soonest at the target, or else the fastest."""
    return fastest(comparison) if comparison.target is None else proven(comparison.times())


def fastest(comparison: Comparison) -> int | None:
    """The number of the fastest variant that is certainly faster than the first, with a result known to be as good.

    That is for the whole run, start-up included, where its length is known.
    """
    judged = comparison.settings.quality
    good = {
        n: row.gain.middle
        for n, row in enumerate(comparison.rows[1:], 1)
        if row.gain is not None and row.gain.low is not None and row.gain.low > 1
        and (not judged or (row.verdict is not None and row.verdict.outcome == PASS))
    }  # fmt: skip
    return max(good, key=lambda n: good[n]) if good else None


def spoken(comparison: Comparison) -> list[str]:
    """The name of each variant in a sentence."""
    first, *others = names(comparison)
    subjects = [comparison.subject.format(name.removeprefix("+ ").removeprefix("− ")) for name in others]
    return [f"the run {first}" if first in AS_IT else first, *subjects]


def headline(comparison: Comparison) -> str:
    """The answer: which variant is soonest at the target, where there is one, which is the fastest, and what starts late."""
    said = spoken(comparison)
    on_target = [] if comparison.target is None else [_on_target(comparison, said)]
    return " ".join([*on_target, _on_speed(comparison, said), *_on_start(comparison, said)])


def _on_target(comparison: Comparison, said: Sequence[str]) -> str:
    """The variant that reaches the target soonest, in one sentence."""
    times, target, first = comparison.times(), comparison.target, comparison.order()[0]
    soonest = times[first]
    if not soonest.reached:
        return f"No variant reaches {target}."
    median = f"{soonest.when} (median), by " if math.isfinite(soonest.median) else ""
    seeds = f"{median}{soonest.reached} of {len(soonest.seconds)} seeds"
    if (best := winner(comparison)) is not None and (faster := times[best].faster_than(times[0])) is not None:
        return f"{said[best]} reaches {target} sooner than {said[0]}, {faster.as_fast()}: {seeds}."
    return f"No variant reaches {target} certainly sooner than {said[0]}; the first in the order is {said[first]}: {seeds}."


def _on_speed(comparison: Comparison, said: Sequence[str]) -> str:
    """The fastest variant whose result is known to be as good, and which result is better, in one sentence."""
    improvements = {n: by for n, row in enumerate(comparison.rows) if n and (by := _improvement(row))}
    better = max(improvements, key=lambda n: improvements[n], default=None)
    best, judged = fastest(comparison), comparison.settings.quality
    if best is None:
        none = f"measurably faster{'' if better is not None else f' than {said[0]}'}"
        uncertain = f"{none}{' with a result known to be as good' if judged else ''}{_nearest(comparison, said)}."
        if better is None:
            return f"No variant is {uncertain}"
        return f"{said[better]} has {_better(comparison.rows[better], said[0])}, but no variant is {uncertain}"
    row, no_worse = comparison.rows[best], ", and its result is no worse" if judged else ""
    speed = f"{said[best]} is {_speed(row, said[0])}"
    if better is None:
        return f"{speed}{no_worse}."
    if best in improvements:
        return f"{speed}, and has {_better(row, said[0])}."
    return f"{speed}{no_worse}; {said[better]} has {_better(comparison.rows[better], said[0])}."


def _nearest(comparison: Comparison, said: Sequence[str]) -> str:
    """The variant that would be the fastest, and why it is not certain: the answer's own figure beside those of the table."""
    ratios = {n: row.ratio for n, row in enumerate(comparison.rows) if n and row.ratio is not None}
    known = any(found.low for found in ratios.values())  # else all that were measured may be shown
    likely = [n for n, found in ratios.items() if found.middle > 1 + EQUIVALENCE or not known]
    nearest = max(likely, key=lambda n: ratios[n], default=None)
    if nearest is None or (row := comparison.rows[nearest]).pays_too_late:
        return ""
    if not ratios[nearest].low:
        rounds = f"{len(row.rates)} rounds are" if len(row.rates) != 1 else "1 round is"
        why = f"and {rounds} too few to tell ({MIN_PAIRS} give an interval)"
    elif ratios[nearest].low <= 1:
        why = "which may be chance"
    elif row.verdict is not None and row.verdict.outcome != PASS:
        why = f"and its result is {row.verdict.outcome}"
    else:
        return ""
    return f": {said[nearest]} is {ratios[nearest].as_fast()}, {why}"


def _speed(row: Row, base: str) -> str:
    """The speed of a variant in words: by its updates; where these are not faster, for the whole run, which starts sooner."""
    ratio = row.ratio
    if row.whole_run is not None and (ratio is None or ratio.low <= 1):
        ratio, base = row.whole_run, f"{base} for the whole run, as it starts sooner"
    assert ratio is not None
    return ratio.as_fast(base)


def _on_start(comparison: Comparison, said: Sequence[str]) -> Iterator[str]:
    """The lines on start-up that outweighs certainly faster updates: in this run, or in one that compiles anew."""
    for name, row in zip(said[1:], comparison.rows[1:], strict=True):
        if row.pays_too_late:
            yield (
                f"{name} has faster updates and starts later, which makes this run no shorter: "
                f"it pays after {row.pays_after:,} updates, and this run has {row.run_updates:,}."
            )
    if (best := fastest(comparison)) is not None:
        uncompiled, updates = comparison.rows[best].first_pays_after, comparison.rows[best].run_updates
        if uncompiled is not None and updates is not None and uncompiled >= updates:
            yield f"Where its kernels are not compiled yet, it pays after {uncompiled:,} updates; this run has {updates:,}."


def _improvement(row: Row) -> float:
    """By how much a variant's metric is better than the first variant's, where that is certain; else 0."""
    found = row.verdict and row.verdict.degradation.get(row.verdict.metric)
    certain = found and found.high is not None and found.high < 0 and row.verdict and row.verdict.outcome != FAIL
    return -found.middle if found and certain else 0.0


def _better(row: Row, base: str) -> str:
    """The figure in which a variant is better than the first variant, and by how much, in words."""
    assert row.verdict is not None
    return f"a better {row.verdict.metric} than {base}, by {_difference(row.verdict).removeprefix('better by ')}"


def table(comparison: Comparison) -> Table:
    """Each variant with all that was measured of it: the time to the target, the result, speed and interval, the rest."""
    rows, verdicts, scale = comparison.rows, [row.verdict for row in comparison.rows], _Scale(comparison.rows)
    columns: dict[str, Sequence[Cell]] = {"variant": names(comparison)}
    if comparison.target is not None:
        times = comparison.times()
        columns |= of_target(times, times[0], comparison.target)
    if comparison.settings.quality:
        metric = next((verdict.metric for verdict in verdicts if verdict is not None), "the metric")
        columns[f"{metric} of the validation set"] = [_difference(v) if v is not None else "–" for v in verdicts]
    columns["speed"] = [figure(row.ratio and row.ratio.middle, "{:.2f} ×") for row in rows]
    columns["95 % interval"] = [Drawn(row.interval() if n else "–", scale.bar(row, not n)) for n, row in enumerate(rows)]
    if comparison.settings.quality:
        columns["no worse?"] = ["–" if v is None else "" if v.outcome == FIRST else v.outcome for v in verdicts]
        columns["seeds"] = ["–" if v is None else str(len(v.runs)) for v in verdicts]
    prose = [name for name in columns if name.endswith("validation set")]
    figures = [row.figures() for row in rows]
    columns |= {name: [each[name] for each in figures] for name in figures[0]}
    found = Table.of(columns, name="The variants", prose=prose, sortable=True, below={"95 % interval": scale.axis()}, spare=LEAST)
    order, best = comparison.order(), winner(comparison)
    ordered = replace(found, rows=[found.rows[n] for n in order], winner=None if best is None else order.index(best))
    return ordered.used(1 + list(columns).index("95 % interval"))


def sections(comparison: Comparison) -> list[Section]:
    """The sections of a comparison: the variants where they differ, why each result is as good or not, the method, the rounds."""
    called, rows, found = names(comparison), comparison.rows, table(comparison)
    shown, same = found.only([n for n, name in enumerate(found.header) if name not in IN_ALL_FIGURES]).differing(
        1 + [*found.header].index("95 % interval")
    )
    rounds = max((len(row.rates) for row in rows), default=0)
    how = (
        f"Relative to {called[0]}: {rounds} rounds, each with fresh processes that run two timed blocks of about "
        f"{comparison.settings.block_s:g} s; one process runs at a time. The point is the Hodges–Lehmann estimate over the "
        "rounds, the bar its 95 % interval (Wilcoxon), on a logarithmic axis around 1. Where the bar includes 1, the rounds do "
        "not distinguish the two."
    )
    of_variants = [
        Curve(name, [(float(n), rate) for n, rate in enumerate(row.rates, 1)]) for name, row in zip(called, rows, strict=True)
    ]
    drawn = charts.curves("Samples a second, round by round", of_variants, "round", zero=True)
    return [
        shown,
        *([words(f"the same for all: {', '.join(f'{name} {cell}' for name, cell in same)}")] if same else []),
        words(*(f"{name} failed: {row.error}" for name, row in zip(called, rows, strict=True) if row.error)),
        words(*(_because(name, row.verdict) for name, row in zip(called, rows, strict=True) if row.verdict is not None)),
        words(*comparison.notes),
        remarks(how),
        folded("All figures", [found]),
        Part(charts.grid([drawn])),
        remarks("A change that all variants share is the machine's; a change of one alone is its own."),
        *([folded("How it is decided whether the result is no worse", [words(*METHOD)])] if comparison.settings.quality else []),
    ]


def titled(comparisons: Mapping[str, Comparison], said: str = "") -> list[Section]:
    """The comparisons under their titles, each with its answer, unless that was `said` already."""
    found: list[Section] = []
    for title, comparison in comparisons.items():
        answer = headline(comparison)
        found += under(title, *([words(answer)] if answer != said else []), *sections(comparison))
    return found


def _because(name: str, verdict: Verdict) -> str:
    """A variant's verdict in a line."""
    if verdict.outcome == FIRST:
        return f"{name}: {verdict.reason}"
    claim = "changes training" if verdict.effect == "changes" else f"claims to be {verdict.effect}"
    return f"{name}, which {claim}: {verdict.outcome}: {verdict.reason}"


def _difference(verdict: Verdict) -> str:
    """Return by how much the metric differs from the first variant's; the first variant's own value; why there is neither."""
    found = verdict.degradation.get(verdict.metric or "")
    if found is None:
        return verdict.reason.split("; ")[0].split(", ")[0].removeprefix(f"{verdict.metric} ")
    return in_words(*found)


class _Scale:
    """A logarithmic scale of ratios, on which twice as fast lies as far from 1 as half as fast."""

    def __init__(self, rows: Sequence[Row]) -> None:
        shown = [value for row in rows if row.ratio is not None for value in row.ratio if value and math.isfinite(value)]
        self.low, self.high = min([0.9, *shown]) / 1.03, max([1.1, *shown]) * 1.03

    def x(self, ratio: float) -> float:
        """Return the pixel of a ratio."""
        share = math.log(ratio / self.low) / math.log(self.high / self.low)
        return MARGIN + (WIDTH - 2 * MARGIN) * share

    def axis(self) -> str:
        """Return the drawing of the scale's numbers."""
        ticks: list[float] = []
        for tick in sorted((t for t in TICKS if self.low <= t <= self.high), key=lambda t: t != 1):  # 1 has the first place
            if all(abs(self.x(tick) - self.x(other)) >= TICK_WIDTH for other in ticks):
                ticks.append(tick)
        texts = "".join(f'<text x="{self.x(t):.1f}" y="11" text-anchor="middle">{t:g} ×</text>' for t in ticks)
        return f'<svg class="ratio" viewBox="0 0 {WIDTH} 14" role="img" aria-label="logarithmic axis">{texts}</svg>'

    def bar(self, row: Row, first: bool) -> str:
        """Return the drawing of a variant's ratio and its interval, beside the line of 1."""
        line = f'<line class="one" x1="{self.x(1):.1f}" x2="{self.x(1):.1f}" y1="0" y2="18"/>'
        if row.ratio is None:
            return f'<svg class="ratio" viewBox="0 0 {WIDTH} 18" role="img" aria-label="not measured">{line}</svg>'
        low, middle, high = row.ratio.low, row.ratio.middle, row.ratio.high  # without an interval 0 or None, and infinite
        kind = "same" if first or not low or low <= 1 <= high else "faster" if low > 1 else "slower"
        drawn = f'<line x1="{self.x(low):.1f}" x2="{self.x(high):.1f}" y1="9" y2="9"/>' if low and not first else ""
        said = f"{middle:.2f}" + (f", 95 % interval {low:.3f} to {high:.3f}" if low and not first else "")
        return (
            f'<svg class="ratio" viewBox="0 0 {WIDTH} 18" role="img" aria-label="{said}"><title>{said}</title>{line}'
            f'<g class="{kind}">{drawn}<circle cx="{self.x(middle):.1f}" cy="9" r="4.5"/></g></svg>'
        )


class Compared(Comparison):
    """A comparison that a notebook shows."""

    def _repr_html_(self) -> str:
        """The answer and its table."""
        return sheet(self)._repr_html_()


def run(argv: Sequence[str], config_dirs: Sequence[str] = ()) -> tuple[Compared, list[VariantSpec]]:
    """Compare the variants, show and save what was found, and return it. Raises UserError where there is nothing to compare."""
    settings, overrides = verbs.split(argv, Settings)
    refuse_resume("compare", overrides)
    specs, notes = swept(overrides, config_dirs)
    if len(specs) < 2:
        raise UserError("there is nothing to compare: give one key several values, as in precision=fp32,bf16")
    refuse_bad(specs)
    quality.check(settings, baseline_job(specs), settings.quality)
    for note in notes:
        echo(note)
    comparison = Compared(**vars(measure(specs, settings, overrides)))
    comparison.raise_if_baseline_failed()
    comparison.notes = notes + comparison.notes
    show(comparison)
    save(comparison, baseline_job(specs), argv)
    return comparison, specs


def sheet(comparison: Comparison, verb: str = "compare") -> Sheet:
    """The sheet of a comparison."""
    return Sheet(f"Techniques compared – drivetrain {verb}", headline(comparison), sections(comparison))


def save(comparison: Comparison, job: Job, argv: Sequence[str], verb: str = "compare") -> None:
    """Write compare.json and compare.html to a new folder under the run's output_dir."""
    command, place = [*verb.split(), *argv], verbs.folder(job, "compare")
    verbs.write(place, "compare", sheet(comparison, verb), command, comparison.as_dict())


def show(comparison: Comparison) -> None:
    """Print the table, in a narrow terminal without the columns that matter least, the notes and the answer."""
    sheet(comparison).show()
