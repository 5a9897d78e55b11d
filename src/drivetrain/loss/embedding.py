"""Losses that compare samples with each other. They are computed from the global batch of all ranks (engine/update_step.py)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine.device import sum_dtype
from drivetrain.core.options.option import BuildContext, Count, Positive, RunSpec
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.trees import Forward, Tree, map_tensors
from drivetrain.loss.base import SMALLEST, Loss, wide

SCALE = "logit_scale"  # log(1 / temperature) of a learned temperature, named as in CLIP
BIAS = "logit_bias"  # as in SigLIP
FIRST, LOWEST = 0.07, 0.01  # of a learned temperature


class Gathered(NamedTuple):
    """The target of a step that computes the loss of the global batch: embeddings are gathered over the ranks."""

    target: Tree
    valid: torch.Tensor  # (n,) True for samples of the batch


class Gradient(NamedTuple):
    """The target of a step that continues with earlier gradients."""

    of_output: list[torch.Tensor]  # of its `floats`


def floats(tree: Tree) -> list[torch.Tensor]:
    """The tensors of a tree with a differentiable dtype."""
    return [leaf for leaf in trees.leaves(tree) if leaf.is_floating_point()]


class ComparingLoss(Loss):
    """The base of the losses over embeddings. The mean is over the samples of the global batch, on any number of ranks.

    The model's outputs are the embeddings. An evaluation computes the loss, and how often the nearest other sample is the right
    one, within each `group` of consecutive samples, so that the number of ranks does not matter.
    """

    compares_samples = True
    metrics: tuple[str, ...] = ("loss", "accuracy")
    best = ("accuracy", max)
    views = 1  # of each sample, in dimension 1 of the inputs
    group: int

    @property
    def evaluated_together(self) -> int:  # type: ignore[override]
        """The number of samples compared in an evaluation."""
        return self.group

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not run.parallel.own_forward:
            yield (
                f"{run.named('loss')} and {run.named('parallel')} exclude each other (it compares all samples of the batch, and "
                "a stage of a pipeline sees one micro-batch at a time): set parallel=ddp or fsdp"
            )
        if self.views > 1 and run.augment and run.data.views == 1:
            yield (
                f"{run.named('loss')} and {run.named('augment')} exclude each other (a sample is two views, and augmentations "
                "take one image): set augment=[], and let the data make its views"
            )
        if run.batch.buckets_lengths:
            yield (
                f"{run.named('loss')} and {run.named('batch')} exclude each other (ranks may have different numbers of samples): "
                "set batch=fixed or batch=accumulate"
            )
        if run.compile.active and run.batch.accumulation_steps > 1:
            yield (
                f"{run.named('loss')} runs the forward of each of several micro-batches twice, and with {run.named('compile')} "
                f"dropout may differ between the two: set compile=none, or batch=fixed instead of {run.named('batch')}"
            )

    def setup(self, context: BuildContext) -> None:
        parallel, epochs = context.parallel, context.run.values["epochs"]
        self._world, self._all_reduce_sum = parallel.data_world, parallel.all_reduce_sum
        self.ranks = self._world.size
        # The most samples of a rank in an update: gathered tensors have this length, so that ranks need not ask.
        self._capacity = -(-context.batch.size(epochs - 1) // self._world.size)

    @abstractmethod
    def over_all(self, embeddings: Tree, target: Tree, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the loss over the samples, and their number; embeddings (n, views, d), valid (n,)."""

    @abstractmethod
    def right(self, embeddings: Tree, target: Tree) -> Sequence[torch.Tensor]:
        """A group's sums for the metrics other than the loss, 0-d: the number of samples with the right nearest one."""

    def joined(self, x: Tree) -> Tree:
        """A batch's model inputs: the views (n, views, …) of all samples, one view after the other."""
        return x.flatten(0, 1) if self.views > 1 and isinstance(x, torch.Tensor) else x

    def input_shape(self, shape: Tree) -> Tree:
        if self.views == 1 or not (isinstance(shape, tuple) and isinstance(shape[0], int)):
            return shape
        if shape[0] != self.views:
            raise UserError(
                f"the loss wants {self.views} views of each sample, stacked in its first dimension, and a sample of the data has "
                f"shape {shape}: let the data make them, or set task=contrastive data.targets=class, which augments it twice"
            )
        return shape[1:]

    def embeddings(self, output: Tree) -> Tree:
        """The model's output as (n, views, d), in float32 at least: a tensor, or a tuple of one for each view.

        A loss may need more: a tree of tensors (n, …), and of 0-d tensors, which belong to all samples.
        """
        if isinstance(output, tuple | list):
            return torch.stack([wide(view) for view in output], 1)
        if output.dim() != 2:
            raise UserError(f"the loss wants embeddings (n, d), but the model's output has {output.dim()} dimensions")
        found: torch.Tensor = wide(output).unflatten(0, (-1, self.views))
        return found

    def step(self, forward: Forward, batch: MicroBatch) -> torch.Tensor:
        return self(forward(self.joined(batch.x)), batch.y)

    def evaluate(self, forward: Forward, batch: MicroBatch, need_output: bool) -> tuple[Tree, torch.Tensor]:
        output = forward(self.joined(batch.x))
        return output, self.sums(output, batch.y)

    def __call__(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        """The mean loss: over the global batch if the target asks for it, else over this batch alone."""
        if isinstance(target, Gradient):
            both = zip(floats(self.embeddings(output)), target.of_output, strict=True)
            return torch.stack([(value * gradient).sum() for value, gradient in both]).sum()
        if not isinstance(target, Gathered):
            total, count = self.sum_and_count(output, target)
            return total / count.clamp(min=SMALLEST)
        loss = self.over_ranks(self.embeddings(output), target)
        # Each rank has only its own samples' gradients. The ranks average them, and they add up to the batch's.
        return loss * self._world.size - loss.detach() * (self._world.size - 1)

    def sum_and_count(self, output: torch.Tensor, target: object) -> tuple[torch.Tensor, torch.Tensor]:
        embeddings = self.embeddings(output)
        return self._exact(embeddings, target, _all_valid(embeddings))

    def over_ranks(self, embeddings: Tree, own: Gathered) -> torch.Tensor:
        """The mean loss over all ranks' samples; only this rank's embeddings have gradients."""
        target = None if self.views > 1 else own.target
        if self._world.size == 1:
            total, count = self._exact(embeddings, target, own.valid)
        else:
            total, count = self._exact(*(map_tensors(self._gather, each) for each in (embeddings, target, own.valid)))
        return total / count.clamp(min=SMALLEST)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' samples (ranks × capacity, …), filled up with zeros; this rank's keep their gradients.

        Values of all samples are averaged over the ranks.
        """
        if not tensor.dim():
            return (self._all_reduce_sum(tensor.detach().clone()) + tensor - tensor.detach()) / self.ranks
        # As numbers, because not every backend sums bool.
        values = tensor.to(torch.int32) if tensor.dtype == torch.bool else tensor
        everything = values.new_zeros(self._world.size, self._capacity, *values.shape[1:])
        everything[self._world.rank, : len(values)] = values.detach()
        everything = self._all_reduce_sum(everything)
        if tensor.requires_grad:
            # Out of place, because autograd does not follow writes by other processes.
            everything = everything.index_fill(0, torch.tensor([self._world.rank], device=tensor.device), 0)
            padding = [0, 0] * (values.dim() - 1) + [0, self._capacity - len(values)]
            others = (self._world.rank, self._world.size - 1 - self._world.rank)
            mine = torch.nn.functional.pad(values, padding).unsqueeze(0)
            everything = everything + torch.nn.functional.pad(mine, [0, 0] * values.dim() + list(others))
        return everything.flatten(0, 1).to(tensor.dtype)

    def _exact(self, embeddings: Tree, target: Tree, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`over_all` without autocast, which would compute its matrix products in 16 bits."""
        with torch.autocast(valid.device.type, enabled=False):
            return self.over_all(embeddings, target, valid)

    def sums(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        """Sums of the loss and of the right samples in groups, and the number of samples (metrics + 1,)."""
        embeddings, found = self.embeddings(output), []
        everyone = _all_valid(embeddings)
        dtype = sum_dtype(everyone.device)
        for rows in torch.arange(len(everyone), device=everyone.device).split(self.group):
            of_group, labels = trees.select(embeddings, rows), None if self.views > 1 else trees.select(target, rows)
            total, count = self._exact(of_group, labels, everyone[rows])
            mean = total / count.clamp(min=SMALLEST)
            found.append(torch.stack([mean.to(dtype) * len(rows), *(r.to(dtype) for r in self.right(of_group, labels))]))
        totals = torch.stack(found).sum(0)
        return torch.cat([totals, torch.full_like(totals[:1], len(everyone))])


def _all_valid(embeddings: Tree) -> torch.Tensor:
    """A mask (n,) in which all samples count."""
    first = next(leaf for leaf in trees.leaves(embeddings) if leaf.dim())
    return torch.ones(len(first), dtype=torch.bool, device=first.device)


class Contrastive(ComparingLoss):
    """InfoNCE: each view finds the other view of its sample among those of the global batch.

    The inputs of a batch are (n, 2, …), two views of each sample in dimension 1; the model, an ordinary encoder, is called with
    the 2n of them. A model of two inputs (images and texts) returns a tuple of two embeddings (n, d) instead. With `within_views`
    the other samples of the same view are candidates too, as in SimCLR's NT-Xent (Chen et al. 2020); without, only the other
    view's samples, as in CLIP (Radford et al. 2021). The loss is the mean over samples and both directions. A learned
    `temperature` begins at FIRST and stays above LOWEST, as CLIP's; it is the model's parameter `logit_scale`.
    """

    changes = "draws two views of a sample together, and other samples apart"
    takes = ("pair",)
    views = 2
    learning = "loss.temperature=learned"  # the setting of a learned temperature, for messages

    def __init__(self, temperature: Positive | Literal["learned"] = 0.1, within_views: bool = True, group: Count = 16) -> None:
        self.temperature, self.within_views, self.group = temperature, within_views, group

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.temperature == "learned" and not run.parallel.calls_parts:
            yield (
                f"{self.learning} and {run.named('parallel')} exclude each other (the temperature is a weight that the "
                "loss reads, and each rank holds a part of the weights): set parallel=ddp"
            )

    def add_parameters(self, model: torch.nn.Module) -> None:
        if self.temperature != "learned":
            return
        self._give(model, SCALE, -math.log(FIRST))

    def _give(self, model: torch.nn.Module, name: str, value: float) -> None:
        """Give the model a parameter that starts at a value, unless it has one, as a CLIP of transformers has."""
        if not isinstance(getattr(model, name, None), torch.nn.Parameter):
            device = next(model.parameters()).device
            model.register_parameter(name, torch.nn.Parameter(torch.tensor(value, device=device)))
        self._model = model

    def embeddings(self, output: Tree) -> Tree:
        """The views (n, 2, d) and a learned temperature, shared by all samples."""
        views = super().embeddings(output)
        if self.temperature != "learned":
            return views
        scale: torch.nn.Parameter = getattr(self._model, SCALE)
        with torch.no_grad():
            scale.clamp_(0, -math.log(LOWEST))
        return views, wide(-scale).exp().mean()

    def over_all(self, embeddings: Tree, target: Tree, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self._scores(embeddings, valid)
        n = len(valid)
        positive = torch.arange(n, device=valid.device) + n * (1 - torch.arange(2, device=valid.device)[:, None])
        losses = torch.nn.functional.cross_entropy(scores, positive.flatten(), reduction="none").view(2, n).mean(0)
        return torch.where(valid, losses, 0.0).sum(), valid.sum().to(losses.dtype)

    def _scores(self, embeddings: Tree, valid: torch.Tensor) -> torch.Tensor:
        """The similarity of each view (2n, first views first) to each candidate (2n); minus infinity for non-candidates."""
        n = len(valid)
        views, temperature = embeddings if isinstance(embeddings, tuple) else (embeddings, self.temperature)
        z = torch.nn.functional.normalize(views, dim=-1).transpose(0, 1).flatten(0, 1)
        number = torch.arange(2 * n, device=z.device)
        excluded = number[:, None] == number
        if not self.within_views:
            excluded = (number[:, None] < n) == (number < n)
        # A missing sample's row keeps its positive, so that its loss is finite; it does not count.
        excluded = excluded | (~valid.repeat(2) & ((number[:, None] - number).abs() != n))
        scores: torch.Tensor = z @ z.T / temperature
        return scores.masked_fill(excluded, float("-inf"))

    def right(self, embeddings: Tree, target: Tree) -> Sequence[torch.Tensor]:
        everyone = _all_valid(embeddings)
        n = len(everyone)
        found = self._scores(embeddings, everyone).argmax(1)[:n]
        return [(found == torch.arange(n, 2 * n, device=found.device)).sum()]


class Siglip(Contrastive):
    """Sigmoid loss of pairs (Zhai et al. 2023, SigLIP): each pair of a first and a second view is a separate yes or no.

    Inputs and outputs are as in `Contrastive`, between views. A logit is similarity × scale + bias. Both are weights of the
    model, as in transformers' SiglipModel: `logit_scale`, a logarithm, begins at log 10, and `logit_bias` at -10. The sum over
    all pairs is divided by the number of samples.
    """

    changes = "decides for each pair of views separately whether it belongs to one sample"
    learning = "loss=siglip"

    def __init__(self, group: Count = 16) -> None:
        super().__init__("learned", False, group)

    def add_parameters(self, model: torch.nn.Module) -> None:
        self._give(model, SCALE, math.log(10.0))
        self._give(model, BIAS, -10.0)

    def embeddings(self, output: Tree) -> Tree:
        """The views (n, 2, d), and scale and bias, shared by all samples."""
        scale, bias = (wide(getattr(self._model, name)).mean() for name in (SCALE, BIAS))
        return ComparingLoss.embeddings(self, output), scale.exp(), bias

    def over_all(self, embeddings: Tree, target: Tree, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        views, scale, bias = embeddings
        first, second = torch.nn.functional.normalize(views, dim=-1).unbind(1)
        logits = first @ second.T * scale + bias
        own = torch.eye(len(valid), dtype=logits.dtype, device=logits.device)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, own, reduction="none")
        return (losses * (valid[:, None] & valid)).sum(), valid.sum().to(losses.dtype)

    def right(self, embeddings: Tree, target: Tree) -> Sequence[torch.Tensor]:
        return super().right((embeddings[0], 1.0), target)


class OfClasses(ComparingLoss):
    """Base class of losses that draw embeddings of one class together."""

    takes = ("class",)
    normalize = True  # True if embeddings are scaled to length 1

    def _distances(self, embeddings: torch.Tensor) -> torch.Tensor:
        z = embeddings[:, 0]
        if self.normalize:
            z = torch.nn.functional.normalize(z, dim=-1)
        squared = (z[:, None] - z).square().sum(-1)
        return squared.clamp(min=SMALLEST).sqrt()  # the square root has no gradient at 0

    def right(self, embeddings: Tree, target: Tree) -> Sequence[torch.Tensor]:
        itself = torch.eye(len(target), dtype=torch.bool, device=target.device)
        nearest = self._distances(embeddings).masked_fill(itself, float("inf")).argmin(1)
        return [(target[nearest] == target).sum()]

    def problem(self, target: Tree, classes: int) -> str | None:
        if target.is_floating_point() or target.dim() != 1:
            return f"are {target.dtype} in {target.dim()} dimensions, and it wants one class number for each sample (n,)"
        return None


class Triplet(OfClasses):
    """Triplet loss with the hardest samples of the global batch (Hermans et al. 2017).

    Each sample is to be closer to the farthest sample of its class than to the nearest of any other, by `margin`. Samples that
    lack either do not count. Distances are Euclidean, between embeddings of length 1 if `normalize`.
    """

    changes = "keeps other classes' samples farther away than the own class's, by a margin"

    def __init__(self, margin: Positive = 0.2, normalize: bool = True, group: Count = 32) -> None:
        self.margin, self.normalize, self.group = margin, normalize, group

    def over_all(self, embeddings: Tree, target: Tree, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distance = self._distances(embeddings)
        both = valid[:, None] & valid
        same = (target[:, None] == target) & both
        other = (target[:, None] != target) & both
        same = same & ~torch.eye(len(target), dtype=torch.bool, device=target.device)
        far = distance.masked_fill(~same, 0.0).amax(1)
        near = distance.masked_fill(~other, float("inf")).amin(1)
        counts = same.any(1) & other.any(1)
        losses = torch.relu(torch.where(counts, far - torch.where(counts, near, 0.0) + self.margin, 0.0))
        return losses.sum(), counts.sum().to(losses.dtype)


class SupCon(OfClasses):
    """Supervised contrastive loss (Khosla et al. 2020, equation 2): each sample finds all others of its class in the batch.

    A sample's loss is the mean of -log softmax over the others of its class, with similarities to all other samples divided by
    `temperature`. Samples that are alone in their class do not count.
    """

    changes = "draws samples of one class together, and of different classes apart"

    def __init__(self, temperature: Positive = 0.1, group: Count = 32) -> None:
        self.temperature, self.group = temperature, group

    def over_all(self, embeddings: Tree, target: Tree, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.nn.functional.normalize(embeddings[:, 0], dim=-1)
        scores = z @ z.T / self.temperature
        others = (valid[:, None] & valid).fill_diagonal_(False)
        # A row without others gets a finite sum, so that its gradient is 0 and not NaN.
        log_p = scores - scores.masked_fill(~others, torch.finfo(scores.dtype).min / 2).logsumexp(1, keepdim=True)
        same = (target[:, None] == target) & others
        losses = -torch.where(same, log_p, 0.0).sum(1) / same.sum(1).clamp(min=1)
        return losses.sum(), same.any(1).sum().to(losses.dtype)
