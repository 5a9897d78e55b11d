"""Attributes the time of updates to the user's lines, from samples of the thread and recorded operations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from drivetrain.measure import intervals
from drivetrain.measure.profile.operations import TimedOperation
from drivetrain.measure.profile.sampler import Samples, Spent
from drivetrain.measure.profile.user_code import Found, Site

MAX_OVERHEAD_MS = 0.01  # of one operation, for the engine of the backward and for recording it
WAITING = "waiting for data"


def together(several: Iterable[Samples]) -> Samples:
    """Add up samples."""
    total: defaultdict[tuple[str, Found], Spent] = defaultdict(Spent)
    for samples in several:
        for place, spent in samples.items():
            total[place] += spent
    return total


@dataclass
class CodeLine:
    """A line of the user's own code; shares are of a step's time, counts of one update."""

    place: str  # file:line in function
    text: str = ""
    reads_data: bool = False  # it runs while the step waits for the loader
    share: float = 0.0  # forward and backward, beyond what the model's layers need
    backward: float = 0.0  # the part of `share` that is its backward
    layers: float = 0.0  # the share that the model's layers take, which this line calls
    waits: float = 0.0  # the share of its host time without work for a core, 0 to 1
    operations: int = 0
    small_operations: int = 0  # on a sixteenth of the input's elements or less
    wide: float = 0.0  # the part of its operations' time that computes in float64
    wasted: float = 0.0  # the share of its operations' time in layers whose weights train but get no gradient
    names: tuple[str, ...] = ()  # of the operations that take most of its time
    host_reads: int = 0  # values read back to the host: .item(), float(), bool()
    created: float = 0.0  # the part of its operations' time that creates tensors on the CPU
    created_ms: dict[str, float] = field(default_factory=dict)  # by factory function, of tensors created on the CPU
    looks: tuple[float, ...] = ()  # `share` in each of several looks

    @property
    def interval(self) -> intervals.Interval:
        """`share` and its 95 % interval, by its spread over the looks; without these it has no width."""
        return intervals.around(self.share, self.looks)


@dataclass
class Attribution:
    """A step's time, by lines; the shares of all lines and of the rest add up to 1."""

    lines: list[CodeLine]  # the one with the largest share first
    rest: dict[str, float]  # time that no line of the user's called, by its kind

    def with_reading(self, samples: Samples) -> Attribution:
        """Divide the waiting for data by samples of reading that was done elsewhere."""
        waiting = self.rest.get(WAITING, 0.0)
        lines = [replace(line, share=line.share * waiting, reads_data=True) for line in attribute(samples, [], 1).lines]
        return Attribution(lines + self.lines, {**self.rest, WAITING: waiting - sum(line.share for line in lines)})


def attribute(
    samples: Samples, operations: Iterable[TimedOperation], updates: int, busy: float = 0.0, watched: int | None = None
) -> Attribution:
    """Attribute a step's time. `operations` were recorded in `updates` updates; `watched` updates were sampled.

    `busy` is the share of the time in which an accelerator works: this share is attributed by the operations' times on the
    device. The rest, in which the device waits for the host, is attributed by the host's samples. For a CPU `busy` is 0.
    """
    operations = [o for o in operations if o.phase != "data"]
    calls: defaultdict[Site | None, list[TimedOperation]] = defaultdict(list)
    for operation in operations:
        calls[operation.found.site].append(operation)
    lines: dict[str, CodeLine] = {}
    line_of: dict[Site | None, CodeLine] = {}
    for site in dict.fromkeys([*calls, *(found.site for _, found in samples)]):
        if site is not None:
            line_of[site] = lines.setdefault(site.place, CodeLine(site.place, site.text))
    rest: defaultdict[str, float] = defaultdict(float)
    spent: defaultdict[str, Spent] = defaultdict(Spent)  # by line
    reading: defaultdict[str, float] = defaultdict(float)  # of it, while the step waits for data
    total = sum(each.own for each in samples.values()) or 1.0
    of_host, backward_s = 1.0 - busy, 0.0
    for (phase, found), seconds in samples.items():
        own = of_host * seconds.own / total
        if found.site is not None:
            line, needed = line_of[found.site], _needed(calls[found.site])
            line.share, line.layers = line.share + own * (1 - needed), line.layers + own * needed
            spent[line.place] += seconds
            reading[line.place] += seconds.own if phase == "data" else 0.0
        elif found.in_backward:
            backward_s += seconds.own
        else:
            rest[OF_NO_LINE[phase]] += own
    parts = _of_backward(operations, 1e3 * backward_s / watched * updates if watched else None)
    device_ms = sum(o.ms + o.backward_ms for o in operations) or 1.0
    for operation, part in zip(operations, parts, strict=True):
        backward = of_host * part * backward_s / total + busy * operation.backward_ms / device_ms
        both = busy * operation.ms / device_ms + backward
        if (known := line_of.get(operation.found.site)) is None:
            rest[OF_NO_LINE[operation.phase]] += both
        elif operation.needed:
            known.layers += both
        else:
            known.share, known.backward = known.share + both, known.backward + backward
    if not any(parts) and backward_s:
        rest["the backward"] = of_host * backward_s / total
    made: defaultdict[str, list[TimedOperation]] = defaultdict(list)
    for site, line in line_of.items():
        made[line.place] += calls[site]
    described = [_described(line, made[at], updates, spent[at], reading[at]) for at, line in lines.items()]
    return Attribution(sorted(described, key=lambda line: (-line.share, -line.operations)), dict(rest))


def _described(line: CodeLine, operations: Sequence[TimedOperation], updates: int, spent: Spent, reading: float) -> CodeLine:
    """The line with its operations and seconds; some of these are spent on `reading`."""
    names, created = Counter[str](), Counter[str]()
    for o in operations:
        names[o.name] += o.ms + o.backward_ms  # type: ignore[assignment]
        if o.creates:
            created[o.name] += o.ms / updates  # type: ignore[assignment]

    def part(chosen: Iterable[TimedOperation]) -> float:
        return sum(o.ms + o.backward_ms for o in chosen) / names.total() if names.total() else 0.0

    return replace(
        line,
        reads_data=2 * reading > spent.own,
        waits=spent.waits / spent.own if spent.own else 0.0,
        operations=len(operations) // updates,
        small_operations=sum(o.small for o in operations) // updates,
        wide=part(o for o in operations if o.wide),
        wasted=part(o for o in operations if o.layer and o.wasted),
        names=tuple(name for name, _ in names.most_common(3)),
        created=part(o for o in operations if o.creates),
        created_ms=dict(created),
    )


OF_NO_LINE = {"data": WAITING, "micro_batch": "model and loss", "update": "the update"}


def _of_backward(operations: Sequence[TimedOperation], backward_ms: float | None) -> list[float]:
    """Return each operation's part of the backward, from the recorded times and the unwatched time `backward_ms`.

    Each operation of the backward has a small cost that the records lack, and each record itself has a small cost. The
    difference of the two times gives both costs together.
    """
    count, recorded = sum(o.backward_operations for o in operations), sum(o.backward_ms for o in operations)
    more = (backward_ms - recorded) / count if count and backward_ms is not None else 0.0
    more = min(MAX_OVERHEAD_MS, max(-MAX_OVERHEAD_MS, more))
    parts = [max(0.0, o.backward_ms + more * o.backward_operations) for o in operations]
    total = sum(parts)
    return [part / total if total else 0.0 for part in parts]


def _needed(operations: Iterable[TimedOperation]) -> float:
    """The share of a call's operation time that is in the model's layers."""
    total = sum(o.ms for o in operations)
    return sum(o.ms for o in operations if o.needed) / total if total else 0.0
