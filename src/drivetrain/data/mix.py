"""Several sources in one order: data=mix."""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Self

from annotated_types import Ge, Gt, Le

from drivetrain.core.errors import UserError, did_you_mean, refuse
from drivetrain.core.lazy import torch
from drivetrain.core.options import groups, horizon, stages
from drivetrain.core.options.allowed import PLAIN_NAME, Entries
from drivetrain.core.options.option import RunSpec
from drivetrain.core.order import AGAIN, BLOCK, WHOLE, Order, index_of
from drivetrain.core.step import rng, trees
from drivetrain.core.step.source import Source
from drivetrain.core.step.trees import Tree
from drivetrain.data.base import IGNORE_INDEX, SPLITS, Data, Splits, measure_on_some
from drivetrain.data.mixture import Mixture

logger = logging.getLogger(__name__)

OF_A_SOURCE = 21  # the stream of a source's own permutations
ITS_OWN = {"train", *SPLITS, "normalize", "example", "origins", "inputs", "doubts", "token_bytes"}  # sources may differ in these
# Properties on which all sources' options must agree, because the rest of a run reads them.
ALIKE = ["tokens", "targets"] + [name for name, value in vars(groups.Data).items() if name[0] != "_" and not callable(value)]


class Joined(Source):
    """Sources one after the other, as one. Sequences of a batch are padded to its longest, with `padding` as inputs."""

    def __init__(self, parts: Mapping[str, Source], padding: int) -> None:
        self.parts, self.padding = list(parts.items()), padding
        self.sizes = [len(source) for source in parts.values()]
        self.ends = torch.tensor(self.sizes).cumsum(0)
        each = list(parts.values())
        self.parallel_read = any(source.parallel_read for source in each)
        self.crops = all(source.crops for source in each)
        lengths = [source.lengths for source in each if source.lengths is not None]
        self.lengths = torch.cat(lengths) if len(lengths) == len(each) else None

    def __len__(self) -> int:
        return sum(self.sizes)

    def fetch(self, indices: torch.Tensor, *options: Any) -> tuple[Tree, Tree]:
        """Return the samples at these positions, each read by its source."""
        of = torch.bucketize(index_of(indices), self.ends, right=True)
        found: list[tuple[torch.Tensor, tuple[Tree, Tree]]] = []
        for number in of.unique().tolist():
            rows = (of == number).nonzero().flatten()
            start = int(self.ends[number]) - self.sizes[number]
            boxes = (
                ([options[0][row] for row in rows.tolist()],) if self.crops and options and options[0] is not None else options
            )
            found.append((rows, self.parts[number][1].fetch(indices[rows] - start, *boxes)))
        if len(found) == 1:
            return found[0][1]
        longest = 0 if self.lengths is None else max(trees.first(x).shape[1] for _, (x, _) in found)
        back = torch.cat([rows for rows, _ in found]).argsort()
        padded = [(self._padded(x, longest, self.padding), self._padded(y, longest, IGNORE_INDEX)) for _, (x, y) in found]
        x, y = (trees.select(trees.concatenate(parts), back) for parts in zip(*padded, strict=True))
        return x, y

    def _padded(self, tree: Tree, longest: int, value: int) -> Tree:
        pad = torch.nn.functional.pad
        return trees.map_tensors(lambda t: pad(t, (0, longest - t.shape[1]), value=value) if longest and t.ndim > 1 else t, tree)

    def name(self, index: int) -> str | None:
        number = int(torch.bucketize(torch.tensor(index), self.ends, right=True))
        key, source = self.parts[number]
        name = source.name(index - int(self.ends[number]) + self.sizes[number])
        return None if name is None else f"{key}: {name}"

    def labels(self) -> torch.Tensor | None:
        found = [labels for _, source in self.parts if (labels := source.labels()) is not None]
        return torch.cat(found) if len(found) == len(self.parts) else None

    def skipped(self) -> list[str] | None:
        found = [names for _, source in self.parts if (names := source.skipped()) is not None]
        return [name for names in found for name in names] if found else None


def mixed(sizes: Sequence[int], mixture: Mixture, length: int) -> Order:
    """Return the order of joined sources: an epoch is `length` positions, and each source continues where it was.

    A source has an order for each time that it is read.
    """
    starts = [sum(sizes[:number]) for number in range(len(sizes))]

    @lru_cache(2 * len(sizes))
    def whole_order(seed: int, turn: int, size: int) -> torch.Tensor:
        return rng.permutation(seed, turn, size)

    def own(seed: int, source: int, turn: int, places: torch.Tensor) -> torch.Tensor:
        of_source, size = rng.mix(seed, OF_A_SOURCE, source), sizes[source]
        return whole_order(of_source, turn, size)[places] if size <= WHOLE else rng.permuted(of_source, turn, size, places)

    def at(seed: int, epoch: int, positions: torch.Tensor) -> torch.Tensor:
        first = epoch * length
        source, index = mixture.at(seed, positions + first)
        before = mixture.counts(first - first % mixture.window)
        found = torch.empty_like(source)
        for number, size in enumerate(sizes):
            rows = (source == number).nonzero().flatten()
            turns = index[rows] // size
            for turn in turns.unique().tolist():
                here = rows[turns == turn]
                again = (turn - before[number] // size) * AGAIN
                found[here] = starts[number] + own(seed, number, turn, index[here] % size) + again
        return found

    def whole(seed: int, epoch: int) -> torch.Tensor:
        return torch.cat([at(seed, epoch, block) for block in torch.arange(length).split(BLOCK)])

    return Order(length, whole, repeats=True, at=at)


def _of_first(method: str) -> Any:
    """Return a method that the first source answers for all."""
    return lambda mix, *given: getattr(mix.first, method)(*given)


@dataclass(kw_only=True, eq=False)
class Mix(Data):
    """Several sources in one order, each with its share.

    A position's source follows from the position alone, so any number of ranks, micro-batches and any resume read the same
    samples. Each source has its own order, its own test and validation sets, and figures named after it.
    """

    machine_local_keys = ("sources", "validation")
    identifying_keys = ("sources",)
    sources: dict[str, Any] | None = None  # name → an option's settings
    weights: Annotated[dict[str, Annotated[float, Ge(0)]], Entries(PLAIN_NAME)] | None = None
    samples: Annotated[int, Ge(1)] | None = None
    at_most: Annotated[dict[str, Annotated[float, Gt(0)]], Entries(PLAIN_NAME)] | None = None
    window: Annotated[int, Ge(1), Le(4096)] = 16
    by_name: dict[str, Data] = field(init=False, default_factory=dict)
    given: object = field(init=False, default=None)  # data.validation, which each source has itself
    not_mixed: ClassVar[dict[str, str]] = {
        "Mix": "it holds sources itself: name them side by side",
        "OwnDataset": "join the Datasets by torch's ConcatDataset, as data=own",
        "OwnStream": "its samples come one after the other",
    }

    def __post_init__(self) -> None:
        self.by_name, self.given = self.sources or {}, self.validation
        for split in SPLITS:
            named = {name: given for part, option in self.by_name.items() for name, given in _sets(part, option, split).items()}
            vars(self)[split] = named or None
        super().__post_init__()

    @property
    def first(self) -> Data:
        """The first source; its common properties are those of all."""
        return next(iter(self.by_name.values()))

    def resolve(self, run: RunSpec) -> Self:
        made = {name: part.returned("resolve", part.resolve(run)) for name, part in self.by_name.items()}
        first = next(iter(made.values()), None)
        shared = {name: getattr(first, name) for name in ALIKE} if first else {}
        return self.with_values(by_name=made, **shared)

    def rules(self, run: RunSpec) -> Iterator[str]:
        """Yield the problems of the sources, each named as its settings are."""
        if not self.by_name:
            yield "data=mix: set data.sources={web: {option: text, path: web.txt}, code: {option: stdlib}}, two of them or more"
            return
        yield from self._of_sources(run)
        if getattr(self.first, "packing", False):
            yield "data=mix: the rows of data.packing=true hold samples of one source: set it to false, and batch=bucketed"
        if self.given is not None or self.folds is not None:
            yield (
                "data.validation and data.folds are of one source: set data.sources={web: {validation: 0.1, …}, …}, where each "
                "has its own"
            )
        if self.order != "shuffled":
            yield f"data.order={self.order}: data=mix has an order of its own: set data.order=shuffled"
        for key in ("weights", "at_most"):
            given = getattr(self, key) or {}
            yield from (
                f"data.{key}.{name} names no source: {did_you_mean(name, self.by_name)}" for name in {*given} - {*self.by_name}
            )
        if self.weights is not None and (missing := [name for name in self.by_name if name not in self.weights]):
            yield f"data.weights says nothing of {' and '.join(missing)}: give each source a weight (0: none of its samples)"
        elif self.weights is not None and not any(self.weights.values()):
            yield "data.weights are all 0: give at least one source a weight above it"
        if (run.batch.tokens or run.batch.buckets_lengths) and len({str(Mix.of(stage.run).weights) for stage in run.stages}) > 1:
            yield "stages with other data.weights need updates in the order of the mix: set batch=fixed batch.tokens=null"

    def _of_sources(self, run: RunSpec) -> Iterator[str]:
        for name, part in self.by_name.items():
            yield from (
                () if PLAIN_NAME.takes(name) else [f"data.sources: '{name}' is no name of a source: take letters, digits and _"]
            )
            yield from (re.sub(r"\bdata\.", f"data.sources.{name}.", line) for line in part.rules(run))
            if (why := self.not_mixed.get(type(part).__name__)) is not None:
                yield f"data.sources.{name} cannot be mixed: {why}"
            for key in ("order", "drop_last", "baseline"):
                if getattr(part, key, None) != getattr(type(part), key, None):
                    yield f"data.sources.{name}.{key} has no effect, as a mix has one order and no baseline: leave it out"
            for key in (name for name in ALIKE if name != "max_value" or not part.tokens):
                mine, theirs = getattr(part, key, None), getattr(self.first, key, None)
                if mine != theirs:
                    yield f"data.sources.{name} has {key}={mine}, and another source {theirs}: mix one kind of samples"

    def advise(self, run: RunSpec) -> Iterator[str]:
        for name, part in self.by_name.items():
            yield from (re.sub(r"\bdata\.", f"data.sources.{name}.", line) for line in part.returned("advise", part.advise(run)))

    def places(self, split: str) -> dict[str, str]:
        return {name: place for name, place in self.several(split).items() if isinstance(place, str) and place != "auto"}

    def load(self, device: torch.device) -> Splits:
        """Load each source with its own sets, and join them. Raises UserError where they differ in more than their samples."""
        every: dict[str, Splits] = {}
        for name, part in self.by_name.items():
            part.like = next(iter(every.values()), None) if part.reads_rows else None
            every[name] = part.load_sets(device)
        name, data = next(iter(every.items()))
        if self.first.reads_rows:
            logger.info("data=mix: all tables are read by the columns, means and categories of %s's training rows", name)
        for other, splits in every.items():
            for key in (each.name for each in fields(Splits) if each.name not in ITS_OWN):
                mine, theirs = getattr(splits, key), getattr(data, key)
                if mine != theirs:
                    raise UserError(
                        f"data.sources: {other} and {name} differ in {key} ({mine!s:.60} and {theirs!s:.60}): give all sources "
                        "the same length, size, tokenizer and classes"
                    )
            if splits.train.in_order or splits.train.own_code is not None:
                raise UserError(
                    f"data.sources.{other}: samples that come one after the other, or from your code, cannot be mixed"
                )
        train = Joined({name: splits.train for name, splits in every.items()}, data.pad_token or 0)
        sets = {
            split: {_joined(name, one): source for name, splits in every.items() for one, source in splits.sets(split).items()}
            for split in SPLITS
        }
        found = [splits.normalize for splits in every.values() if splits.normalize is not None]
        alike = all(torch.equal(each.mean, found[0].mean) and torch.equal(each.std, found[0].std) for each in found)
        return replace(
            data, train=train, test=sets["test"], validation=sets["validation"] or None,
            normalize=data.normalize if alike else measure_on_some(train, data.images),
            origins={key: value for splits in every.values() for key, value in splits.origins.items()},
            doubts=[f"{name}: {line}" for name, splits in every.items() for line in splits.doubts],
        )  # fmt: skip

    def order_of(self, source: Source, run: RunSpec) -> Order:
        """Return the order of the mixture, and log each source's share. Raises UserError where one is read too often."""
        assert isinstance(source, Joined)
        shares = [self._shares(Mix.of(stage.run), source.sizes) for stage in run.stages] or [self._shares(self, source.sizes)]
        largest, share = max((size, share) for size, share in zip(source.sizes, shares[0], strict=True) if share)
        length = self.samples or round(largest / share)
        over = horizon.run_horizon(run, length)
        ends = [] if over is None else [stages.in_updates(end, over) for end in stages.boundaries(run, over)]
        starts = [0, *(_position(run, over, length, round(end)) for end in ends if over is not None)]
        mixture = Mixture(shares[: len(starts)], starts, self.window)
        end = run.values["epochs"] * length if over is None else _position(run, over, length, over.updates)
        passes = {
            name: count / size for (name, _), size, count in zip(source.parts, source.sizes, mixture.counts(end), strict=True)
        }
        refuse(
            f"data.at_most.{name}={most:g}: the run reads {name} {passes[name]:.2f} times ({size:,} samples): lower its weight, "
            "train shorter, or allow more"
            for (name, _), size in zip(source.parts, source.sizes, strict=True)
            if passes[name] > (most := (self.at_most or {}).get(name, float("inf")))
        )
        said = ", ".join(
            f"{name} {100 * share:.1f} % (read {passes[name]:.2f} times)"
            for (name, _), share in zip(source.parts, self._shares(self, source.sizes), strict=True)
        )
        logger.info("data=mix: %s; an epoch is %s samples", said, f"{length:,}")
        return mixed(source.sizes, mixture, length)

    def _shares(self, option: Mix, sizes: Sequence[int]) -> list[float]:
        weights = sizes if option.weights is None else [option.weights[name] for name in self.by_name]
        return [weight / sum(weights) for weight in weights]

    def train_samples(self) -> int | None:
        return self.samples

    def decodes_images(self) -> bool:
        return any(part.decodes_images() for part in self.by_name.values())

    shape, encode, decode = _of_first("shape"), _of_first("encode"), _of_first("decode")
    answer_texts, read_inputs, reads_file = _of_first("answer_texts"), _of_first("read_inputs"), _of_first("reads_file")


def _joined(name: str, of_source: str) -> str:
    """Return the name of a source's set among all sets."""
    return f"{name}_{of_source}" if of_source else name


def _sets(name: str, option: Data, split: str) -> dict[str, object]:
    """Return an option's setting for the sets of a split, by their names among all sets."""
    given = option.several(split) or {"": option.test if split == "test" else option.validation}
    return {_joined(name, one): value for one, value in given.items() if value is not None or split == "test"}


def _position(run: RunSpec, over: horizon.Horizon, length: int, update: int) -> int:
    """Return a run's position in the order of all epochs after a number of updates."""
    epoch = bisect_right(over.ends, update)
    begin = over.ends[epoch - 1] if epoch else 0
    return epoch * length + (update - begin) * run.batch.size(min(epoch, len(over.ends) - 1))
