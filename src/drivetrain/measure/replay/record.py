"""Trains a run again up to an update, exactly, and looks into it. The trainer is the run's own, and so is its step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from drivetrain.core.errors import Diverged
from drivetrain.core.machine.device import sum_dtype
from drivetrain.core.order import index_of
from drivetrain.core.step import streams, trees
from drivetrain.core.step.microbatch import MicroBatch, Request
from drivetrain.core.step.source import original
from drivetrain.core.step.step import Stream, WrappingStep
from drivetrain.core.step.trees import Tree
from drivetrain.data.base import Data
from drivetrain.engine.trainer import Trainer
from drivetrain.logger.drawing import in_words, pixels
from drivetrain.loss import Loss
from drivetrain.saving.options import Saving
from drivetrain.saving.writer import Writer

CHARACTERS = 200  # of a text
SHOWN = 12  # samples of a rank that are drawn

Sizes = dict[str, float]  # of an update: "output of block.1" → its size


@dataclass
class Plan:
    """The updates that are looked into."""

    low: int
    high: int  # of these updates the first that is not finite, else the one with the largest loss
    back: int  # updates before `low` that are looked at, too
    until: int  # the end of the record that has it
    samples: int  # of each micro-batch, whose gradients are taken: those with the largest losses


@dataclass
class LookedAt:
    """A sample of the update."""

    name: str
    input: float  # the largest absolute value in it and in its target; inf: one is not finite
    x: Tree  # as the model got it
    y: Tree
    loss: float | None = None  # its own
    gradient: float | None = None  # the norm of its own gradient; None: not taken
    earlier: float | None = None  # its own loss at the weights of some updates before
    target: str = ""
    text: str = ""
    picture: np.ndarray | None = None

    @property
    def rank(self) -> tuple[float, ...]:
        """Its place among others, the smallest the worst: by its input where that is not finite, its loss, its gradient."""
        return tuple(-worse(value) for value in (self.input == math.inf, self.loss or 0.0, self.gradient or 0.0))


@dataclass
class Found:
    """What a rank found of the update."""

    update: int
    earlier: int  # the update before which the earlier weights were
    samples: list[LookedAt]
    history: dict[int, Sizes]
    losses: dict[int, float]
    unseen: list[str]  # what could not be looked into, and why


@dataclass
class Moment:
    """The model before an update, and what it trains on then."""

    update: int
    weights: dict[str, torch.Tensor]  # and buffers
    batches: list[tuple[MicroBatch, Request, dict[str, torch.Tensor]]] = field(default_factory=list)  # with the random states


class Reached(Exception):
    """There is no more to look at."""


class Recorder(WrappingStep):
    """The run's own step, with a look at the model and at what it computes in the updates of a plan."""

    def __init__(self, trainer: Trainer, plan: Plan) -> None:
        super().__init__(trainer.step)
        self.plan, self.model = plan, trainer.model
        self.history: dict[int, Sizes] = {}
        self.losses: dict[int, float] = {}
        self.waiting: list[tuple[MicroBatch, Request]] = []
        self.now: Moment | None = None  # of the update that is being made
        self.first: Moment | None = None
        self.chosen: Moment | None = None
        self.trainer = replace(
            trainer,
            step=self,
            writer=Writer(trainer.run_dir, Saving(), trainer.parallel, nullcontext),
            stream_watchers=[*trainer.stream_watchers, self._watch],
        )

    def run(self) -> Found | None:
        """Train to the update, and return what it did; None where the run ends before it."""
        trainer, unseen = self.trainer, []
        with ExitStack() as hooks:
            if trainer.compile_seconds() is not None:
                unseen.append("the layers' outputs: the model is compiled")
            else:
                hooks.callback(self.model.register_forward_pre_hook(partial(self._see, "the inputs")).remove)
                for name, module in self.model.named_modules():
                    hooks.callback(module.register_forward_hook(partial(self._see, f"output of {name or 'the model'}")).remove)
            with suppress(Reached, Diverged):
                trainer.fit()
        if (at := self.chosen or self.now) is None or self.first is None:
            return None
        samples = [self._sample(batch, request, n) for batch, request, _ in at.batches for n in range(trees.length(batch.x))]
        try:
            self._own_losses(at, samples)
        except (NoOwnLoss, RuntimeError) as error:
            unseen.append(f"the samples' own losses: {str(error).splitlines()[0]}")
        samples.sort(key=lambda sample: sample.rank)
        for n, sample in enumerate(samples):
            if n < SHOWN:
                self._draw(sample)
            sample.x = sample.y = None  # they stay in this process
        return Found(at.update, self.first.update, samples, self.history, self.losses, unseen)

    def _watch(self, stream: Stream) -> Stream:
        for batch, request in zip(stream, self.trainer.requests(), strict=False):
            self.waiting.append((batch, request))
            yield batch

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        if len(self.waiting) == 1:
            self._begin(self.trainer.progress.updates + 1, loss_sum)
        if self.now is not None and self.waiting[-1][1].weight:  # else it only fills up
            self.now.batches.append((*self.waiting[-1], streams.state()))
        self.inner.micro_batch(batch, loss_sum)
        self.loss_sum = loss_sum

    def _begin(self, update: int, loss_sum: torch.Tensor) -> None:
        """Keep the weights before an update of the plan."""
        self.now = None
        if self.plan.low - self.plan.back <= update <= self.plan.high:
            self.before = loss_sum.clone()
            self.now = Moment(update, {name: tensor.detach().clone() for name, tensor in self._tensors()})
            self.first = self.first or self.now
            self.history[update] = {}

    def update(self) -> bool:
        if (now := self.now) is None:
            return bool(self.inner.update())
        here, parameters = self.history[now.update], dict(self.model.named_parameters())
        precision, one = self.trainer.precision, torch.ones((), device=self.trainer.device)
        scale = float(precision.scaled(one, one.clone())) if precision.scales_loss else 1.0
        for name in reversed(parameters):
            if (gradient := parameters[name].grad) is not None:
                here[f"gradient of {name}"] = size(gradient) / scale
        made = bool(self.inner.update())
        for name, parameter in parameters.items():
            if parameter.requires_grad and parameter.ndim > 1:
                before = now.weights[name]
                here[f"update of {name}"] = size(parameter.detach() - before) / max(size(before), 1e-12)
        loss = self.trainer.parallel.all_reduce_sum(self.loss_sum - self.before) / self.trainer.parallel.data_world.size
        self._choose(now, float(loss), made)
        return made

    def _choose(self, now: Moment, loss: float, made: bool) -> None:
        """Choose this update if it is one of the plan's, and the first that is not finite or that with the largest loss."""
        self.losses[now.update] = loss
        if now.update < self.plan.low:
            return
        sizes = self.trainer.parallel.gather_object(list(self.history[now.update].values()))
        bad = self.trainer.parallel.broadcast_object(not all(map(math.isfinite, chain([loss], *sizes))))
        self.over = bad and (made or not math.isfinite(loss))
        if self.chosen is None or self.over or loss > self.losses[self.chosen.update]:
            self.chosen = now

    over = False  # the weights are not finite from here on

    def zero_grad(self) -> None:
        self.inner.zero_grad()
        self.waiting.clear()
        if self.over or self.trainer.progress.updates >= self.plan.until:
            self.trainer.record()
            raise Reached

    def _see(self, name: str, *call: Tree) -> None:
        """Keep the size of what a hook gets: a module, its inputs and, where there is one, its output."""
        if self.now is not None and self.model.training:
            here = self.history[self.now.update]
            for leaf in trees.leaves(call[-1]):
                if leaf.is_floating_point() and leaf.numel():
                    here[name] = worse(here.get(name, 0.0), size(leaf) / math.sqrt(leaf.numel()))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return chain(self.model.named_parameters(), self.model.named_buffers())

    def _sample(self, batch: MicroBatch, request: Request, place: int) -> LookedAt:
        """A sample of a micro-batch, with its name."""
        x, y = (trees.select(tree, at(place, batch)) for tree in (batch.x, batch.y))
        largest = [worse(float(leaf.abs().max())) for leaf in trees.leaves((x, y)) if leaf.is_floating_point() and leaf.numel()]
        found = LookedAt(f"sample {place} of its batch", max(largest, default=0.0), x, y)
        if len(request.indices) == trees.length(batch.x):  # else a function of the user's has left some out
            data, numbers = self.trainer.train_data.source, index_of(request.indices)
            found.name = data.name(int(numbers[place])) or f"row {original(data, int(numbers[place]))[1]}"
            if request.mix_with is not None:
                found.name += f", mixed with row {original(data, int(request.mix_with[place]))[1]}"
        return found

    def _draw(self, sample: LookedAt) -> None:
        """Add a sample's target in words, and its text or picture, as the model got it."""
        context, x, targets = self.trainer.callbacks.context, trees.first(sample.x)[0].cpu(), trees.leaves(sample.y)
        if len(targets) == 1 and targets[0].ndim < 3:
            sample.target = ", ".join(in_words(targets[0][0].cpu(), context.run.data.targets, context.data.names))[:CHARACTERS]
        if x.ndim == 3 and x.shape[0] in (1, 3):
            sample.picture = pixels(torch.nan_to_num(x.float(), posinf=0, neginf=0).numpy(), None)
        elif not x.is_floating_point() and x.ndim == 1:
            text = Data.of(context.run).decode(x.tolist(), context.data)
            sample.text = " ".join((text if text is not None else str(x.tolist())).split())[:CHARACTERS]

    def _own_losses(self, now: Moment, samples: Sequence[LookedAt]) -> None:
        """Fill in the samples' own losses, at the weights before the update and at the earlier ones, and norms of gradients.

        Where none is finite, as where BatchNorm mixes the samples, they are those in evaluation mode. Raises NoOwnLoss.
        """
        run, of = self.trainer.callbacks.context.run, self.trainer.evaluator.loss
        if of.compares_samples:
            raise NoOwnLoss(f"{run.named('loss')} compares samples")
        if not (run.parallel.whole_model and run.parallel.own_forward):
            raise NoOwnLoss(f"with {run.named('parallel')} a rank has a part of the weights")
        if hasattr(of, "head"):
            of.head = None  # the output layer gives its logits
        assert self.first is not None
        for training in (True, False):
            self.model.train(training)
            both = zip(samples, [*self._at(now, now, self.plan.samples)], self._at(self.first, now, 0), strict=True)
            for sample, (loss, gradient), (earlier, _) in both:
                sample.loss, sample.gradient, sample.earlier = loss, gradient, earlier
            if any(math.isfinite(sample.loss or 0.0) for sample in samples):
                break

    def _at(self, weights: Moment, now: Moment, most: int) -> Iterator[tuple[float, float | None]]:
        """Yield the loss of each sample at some weights, and of the `most` worst of each micro-batch the norm of the gradient."""
        for name, tensor in self._tensors():
            tensor.data.copy_(weights.weights[name])
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for batch, _, random in now.batches:
            streams.restore(random)
            loss = self.trainer.evaluator.loss
            with torch.set_grad_enabled(most > 0), self.trainer.precision.autocast():
                output = self.trainer.evaluator.forward(loss.joined(batch.x))
                own = [own_loss(loss, output, batch, n) for n in range(trees.length(batch.x))]
            worst = set(sorted(range(len(own)), key=lambda n: -worse(float(own[n])))[:most])
            for n, value in enumerate(own):
                gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True) if n in worst else ()
                yield float(value), math.hypot(*(size(g) for g in gradients if g is not None)) if n in worst else None


class NoOwnLoss(Exception):
    """A loss that cannot be computed of one sample."""


def own_loss(loss: Loss, output: Tree, batch: MicroBatch, place: int) -> torch.Tensor:
    """The loss of one sample, given the output of its whole micro-batch. Raises NoOwnLoss."""
    if any(leaf.ndim and len(leaf) != trees.length(batch.x) for leaf in trees.leaves(output)):
        raise NoOwnLoss("the model's output has not a row for each sample")
    calls = Counter[str]()

    def forward(*_: object, **__: object) -> Tree:
        calls["model"] += 1
        if calls["model"] > 1:
            raise NoOwnLoss(f"{getattr(loss, 'target', type(loss).__name__)} runs the model more than once in a step")
        return trees.select(output, at(place, batch))

    x, y = (trees.select(tree, at(place, batch)) for tree in (batch.x, batch.y))
    return loss.step(forward, replace(batch, x=x, y=y, weight=torch.ones_like(batch.weight), shares=None))


def at(place: int, batch: MicroBatch) -> torch.Tensor:
    """The place of a sample as `trees.select` takes it."""
    return torch.tensor([place], device=trees.first(batch.x).device)


def size(tensor: torch.Tensor) -> float:
    """The norm of a tensor, also where this rank has only a part."""
    norm = torch.linalg.vector_norm(tensor.detach(), dtype=sum_dtype(tensor.device))
    return float(getattr(norm, "full_tensor", lambda: norm)())


def worse(*values: float) -> float:
    """The largest of some sizes; what is not finite is larger than all."""
    return max(value if math.isfinite(value) else math.inf for value in values)
