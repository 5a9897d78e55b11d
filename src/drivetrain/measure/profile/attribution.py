"""Joins what the sampler saw with the recorded operations: which share of a step each line of the user's takes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from drivetrain.measure.profile.sampler import Found, Operation, Site, Spent

MAX_OVERHEAD_MS = 0.01  # of one operation, for the engine of the backward and for recording it
WAITING = "waiting for data"
Samples = Mapping[tuple[str, Found], Spent]


@dataclass
class Line:
    """A line of the user's own code; shares are those of a step's time, counts those of one update."""

    place: str  # file:line in function
    text: str = ""
    reads_data: bool = False  # it runs while the step waits for the loader
    share: float = 0.0  # forward and backward, beyond what the model's layers need
    backward: float = 0.0  # the part of `share` that is its backward
    layers: float = 0.0  # the share that the model's layers take, which this line calls
    waits: float = 0.0  # the part of its time on the host in which it has no work for a core, 0 to 1
    operations: int = 0
    small_operations: int = 0  # on a sixteenth of the input's elements or less
    wide: float = 0.0  # the part of its operations' time that computes in float64
    wasted: float = 0.0  # the part of its operations' time that no backward needs, of weights that train
    names: tuple[str, ...] = ()  # of the operations that take most of its time
    host_reads: int = 0  # values read back to the host: .item(), float(), bool()
    created: float = 0.0  # the part of its operations' time that creates tensors on the CPU
    created_ms: dict[str, float] = field(default_factory=dict)  # by factory function, of tensors created on the CPU

    @property
    def function(self) -> str:
        """`function in file`."""
        file, _, function = self.place.rpartition(" in ")
        return f"{function} in {file.rpartition(':')[0]}"


@dataclass
class Attribution:
    """A step's time, by lines; the shares of all lines and of the rest add up to 1."""

    lines: list[Line]  # the one with the largest share first
    rest: dict[str, float]  # by what it is, of time that no line of the user's called

    def with_reading(self, samples: Samples) -> Attribution:
        """Divide the waiting for data by samples of reading that was done elsewhere."""
        waiting = self.rest.get(WAITING, 0.0)
        lines = [replace(line, share=line.share * waiting, reads_data=True) for line in attribute(samples, [], 1).lines]
        return Attribution(lines + self.lines, {**self.rest, WAITING: waiting - sum(line.share for line in lines)})


@dataclass
class _Site:
    """What is known of one call."""

    spent: Spent = field(default_factory=Spent)
    data: float = 0.0  # seconds while the step waited for data
    operations: list[Operation] = field(default_factory=list)
    share: float = 0.0
    backward: float = 0.0
    layers: float = 0.0


def attribute(
    samples: Samples, operations: Iterable[Operation], updates: int, busy: float = 0.0, watched: int | None = None
) -> Attribution:
    """Attribute a step's time. `operations` are those of several `updates`; `watched` updates were sampled.

    `busy` is the share of the time in which an accelerator works: that is divided by the operations' times on the
    device, and only the rest, in which the device waits for the host, by what the host does. A CPU's is 0.
    """
    operations = [o for o in operations if o.phase != "data"]
    sites, rest = _by_site(samples, operations)
    total = sum(site.spent.own for site in sites.values()) + sum(rest.values()) or 1.0
    backward_s = rest.pop("backward", 0.0)
    of_host = 1.0 - busy
    shares = {name: of_host * seconds / total for name, seconds in rest.items()}
    for site in sites.values():
        own = of_host * site.spent.own / total
        needed = _needed(site.operations)
        site.share, site.layers = own * (1 - needed), own * needed
    backward = _of_backward(operations, 1e3 * backward_s / watched * updates if watched else None)
    device_ms = sum(o.ms + o.backward_ms for o in operations)
    for operation, part in zip(operations, backward, strict=True):
        forward = busy * operation.ms / device_ms if device_ms else 0.0
        back = of_host * part * backward_s / total + (busy * operation.backward_ms / device_ms if device_ms else 0.0)
        known = sites.get(operation.found.site) if operation.found.site is not None else None
        if known is None:
            shares[_rest_name(operation.phase)] = shares.get(_rest_name(operation.phase), 0.0) + forward + back
        elif operation.needed:
            known.layers += forward + back
        else:
            known.share += forward + back
            known.backward += back
    if not any(backward) and backward_s:
        shares["the backward"] = of_host * backward_s / total
    return Attribution(_lines(sites, updates), shares)


def _of_backward(operations: Sequence[Operation], backward_ms: float | None) -> list[float]:
    """Return each operation's part of the backward, from their recorded times and `backward_ms`, which nothing watched.

    Beside its operations the backward has a small cost for each of them, which the records lack, and these have a small cost
    of their own for each: the difference tells both together.
    """
    count, recorded = sum(o.backward_operations for o in operations), sum(o.backward_ms for o in operations)
    more = (backward_ms - recorded) / count if count and backward_ms is not None else 0.0
    more = min(MAX_OVERHEAD_MS, max(-MAX_OVERHEAD_MS, more))
    parts = [max(0.0, o.backward_ms + more * o.backward_operations) for o in operations]
    total = sum(parts)
    return [part / total if total else 0.0 for part in parts]


def _by_site(samples: Samples, operations: Iterable[Operation]) -> tuple[dict[Site, _Site], dict[str, float]]:
    """Sort samples and operations by their site; the seconds of samples without one, by what they are."""
    sites: defaultdict[Site, _Site] = defaultdict(_Site)
    rest: defaultdict[str, float] = defaultdict(float)
    for (phase, found), spent in samples.items():
        if found.site is None:
            rest["backward" if found.in_backward else _rest_name(phase)] += spent.own
            continue
        site = sites[found.site]
        site.spent.busy += spent.busy
        site.spent.waits += spent.waits
        site.data += spent.own if phase == "data" else 0.0
    for operation in operations:
        if operation.found.site is not None:
            sites[operation.found.site].operations.append(operation)
    return sites, rest


def _rest_name(phase: str) -> str:
    return {"data": WAITING, "micro_batch": "model and loss", "update": "the update"}[phase]


def _needed(operations: Iterable[Operation]) -> float:
    """The part of a call's time that the model's layers need: that of their operations among its own."""
    by_need = Counter[bool]()
    for operation in operations:
        by_need[operation.needed] += operation.ms  # type: ignore[assignment]
    total = by_need[True] + by_need[False]
    return by_need[True] / total if total else 0.0


def _lines(sites: Mapping[Site, _Site], updates: int) -> list[Line]:
    by_place: defaultdict[str, list[_Site]] = defaultdict(list)
    texts = {}
    for key, site in sites.items():
        by_place[key.place].append(site)
        texts[key.place] = key.text
    lines = [_line(place, texts[place], found, updates) for place, found in by_place.items()]
    return sorted(lines, key=lambda line: (-line.share, -line.operations))


def _line(place: str, text: str, sites: list[_Site], updates: int) -> Line:
    operations = [o for site in sites for o in site.operations]
    own, waits = sum(s.spent.own for s in sites), sum(s.spent.waits for s in sites)
    ms = sum(o.ms + o.backward_ms for o in operations)
    by_name, created = Counter[str](), Counter[str]()
    for o in operations:
        by_name[o.name] += o.ms + o.backward_ms  # type: ignore[assignment]
        if o.creates:
            created[o.name] += o.ms / updates  # type: ignore[assignment]

    def part(operations: Iterable[Operation]) -> float:
        return sum(o.ms + o.backward_ms for o in operations) / ms if ms else 0.0

    return Line(
        place,
        text,
        reads_data=2 * sum(s.data for s in sites) > own,
        share=sum(s.share for s in sites),
        backward=sum(s.backward for s in sites),
        layers=sum(s.layers for s in sites),
        waits=waits / own if own else 0.0,
        operations=len(operations) // updates,
        small_operations=sum(o.small for o in operations) // updates,
        wide=part(o for o in operations if o.wide),
        wasted=part(o for o in operations if o.layer and o.wasted),
        names=tuple(name for name, _ in by_name.most_common(3)),
        created=part(o for o in operations if o.creates),
        created_ms=dict(created),
    )
