"""The reference in float64, and the same with every operation rounded at random: what rounding alone can change."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.checkpointing import Checkpointing
from drivetrain.compile import Compile
from drivetrain.core import trees
from drivetrain.core.context import BuildContext
from drivetrain.core.option import RunSpec
from drivetrain.core.trees import Tree
from drivetrain.parallel import Parallel
from drivetrain.precision import Precision

# Products round their inputs too, where these are kept in a wider format.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "linear")


class Float64(Precision):
    """Weights, activations, gradients and optimizer state in float64. Data and first weights are those of the run, converted."""

    full_float32 = False

    def setup(self, context: BuildContext) -> None:
        self._device = context.device

    def convert(self, model: torch.nn.Module, example: Tree) -> torch.nn.Module:
        model.double()
        model.register_forward_pre_hook(
            lambda _, args, kwargs: (tuple(map(widened, args)), {k: widened(v) for k, v in kwargs.items()}), with_kwargs=True
        )
        return model


def widened_run(run: RunSpec) -> RunSpec:
    """Return the run in float64, with all its techniques."""
    return replace(run, parts={**run.parts, "precision": Float64()})


def shadow_of(run: RunSpec) -> RunSpec:
    """Return the run in float64, in one process, as plain operations. Micro-batches are those of the run's steps and ranks."""
    batch = copy.deepcopy(run.batch)
    batch.accumulation_steps = run.batch.accumulation_steps * run.parallel.data_ranks()
    plain = {"precision": Float64(), "parallel": Parallel(), "compile": Compile(), "checkpointing": Checkpointing()}
    return replace(run, parts={**run.parts, **plain, "batch": batch})


def widened(tree: Tree) -> Tree:
    """Return a tree with its floating-point tensors in float64."""
    return trees.map_tensors(lambda t: t.double() if t.is_floating_point() else t, tree)


def widen_loss(loss: Any) -> None:
    """Convert what a loss holds, such as class weights or a teacher, to float64."""
    for name, value in vars(loss).items():
        if isinstance(value, torch.nn.Module):
            value.double()
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            setattr(loss, name, value.double())


@dataclass
class RandomRounding(TorchDispatchMode):
    """Changes the result of each operation by a random relative error of at most `roundoff` (Monte Carlo arithmetic).

    Parker 1997; a run with it differs from the exact one as a run in that number format does, and shows how errors grow.
    """

    roundoff: float
    seed: int
    paused: bool = field(default=False, init=False)  # while the tensors are looked at

    def __post_init__(self) -> None:
        super().__init__()
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func.overloadpacket.__name__ in PRODUCTS:
            args = tuple(self._rounded(a) for a in args)
        out = func(*args, **kwargs)
        if any(result.alias_info is not None for result in func._schema.returns):  # a view, or written in place
            return out
        return tuple(map(self._rounded, out)) if isinstance(out, tuple) else self._rounded(out)

    def _rounded(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float64 or not value.numel():
            return value
        noise = torch.rand(value.shape, generator=self._generator(value.device), dtype=torch.float64, device=value.device)
        return value * noise.mul_(2 * self.roundoff).add_(1 - self.roundoff)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]
