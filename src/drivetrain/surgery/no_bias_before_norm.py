"""surgery=[no_bias_before_norm]: remove biases that a BatchNorm subtracts again.

A batch runs through the model with every operation recorded, so neither module names nor module order matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from drivetrain.core.lazy import torch
from drivetrain.core.step.modules import replace_parameters, run_once
from drivetrain.core.step.trees import Tree, leaves
from drivetrain.surgery.base import Edit


class NoBiasBeforeNorm(Edit):
    """Remove biases that a BatchNorm subtracts again.

    A bias is removed if the output of its convolution or linear layer is read by one batch norm over its own channels and
    by nothing else. The norm's running mean is reduced by the bias, so that outputs stay the same in evaluation too.
    """

    effect = "close"
    changes = "without the biases that a BatchNorm subtracts again"

    def apply(self, model: torch.nn.Module, example: Tree) -> str:
        removed = biases_before_norm(model, example)
        norms = sum(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules())
        if norms and not removed:
            return f"no bias before a BatchNorm to remove: none of the model's {norms} BatchNorms subtracts one"
        for bias, running_mean in removed:
            if running_mean is not None:
                running_mean -= bias.detach()
        replace_parameters(model, {id(bias): None for bias, _ in removed})
        return f"{len(removed)} biases before a BatchNorm removed"


def biases_before_norm(model: torch.nn.Module, example: Tree) -> list[tuple[torch.nn.Parameter, torch.Tensor | None]]:
    """The biases that one batch norm subtracts, each with that norm's running mean (None if it keeps none).

    The norm must subtract the bias both in evaluation and in training: a dropout between the two acts in training only.
    A bias that several modules share is not returned. The model is left unchanged.
    """
    owners = [id(p) for module in model.modules() for p in module._parameters.values() if p is not None]
    parameters = {id(p): p for p in model.parameters() if owners.count(id(p)) == 1}
    evaluated, trained = (dict(_subtracted_biases(_record(model, example, training))) for training in (False, True))
    return [
        (parameters[bias], mean if isinstance(mean, torch.Tensor) else None)
        for bias, mean in trained.items()
        if bias in evaluated and bias in parameters
    ]


@dataclass
class _Recording:
    """The operations of one forward that made each tensor, and that read it. Tensors are keyed by their id()."""

    biases: dict[int, int] = field(default_factory=dict)  # tensor → the bias that was added to its channels
    readers: dict[int, list[object]] = field(default_factory=dict)  # tensor → per reader: a norm's key, or None for any other
    norms: list[object] = field(default_factory=list)  # a key for each call: the norm's running mean, or a new object
    alive: list[torch.Tensor] = field(default_factory=list)  # keeps the tensors, so that no id() is used twice

    def read(self, value: Tree, reader: object = None) -> None:
        """Record that `reader` reads all tensors in `value`."""
        for tensor in leaves(value):
            self.alive.append(tensor)
            self.readers.setdefault(id(tensor), []).append(reader)

    def call(
        self, function: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree], out: Tree, training: bool
    ) -> None:
        """Record a call of a torch function that returned `out`."""
        named = dict(zip(_ARGUMENTS.get(function.__name__, ()), args, strict=False)) | kwargs
        if function is torch.nn.functional.batch_norm:
            subtracts = named["training"] or not training  # a frozen norm subtracts its running mean, not the batch's
            self.norms.append(key := named["running_mean"] if named["running_mean"] is not None else object())
            self.read(named.pop("input"), key if subtracts else None)
            self.read(named)
        elif leaves(out) or function.__name__ not in _METADATA_ONLY:
            bias, weight = named.get("bias"), named.get("weight")
            # Batch norm takes the second dimension as channels. A convolution has its channels there; a linear layer has
            # them last, which is the second dimension only of a 2-d output.
            if bias is not None and weight is not None and out.ndim == weight.ndim:
                self.alive.append(out)
                self.biases[id(out)] = id(bias)
            self.read((args, kwargs))


_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "linear"), ("input", "weight", "bias")),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), ("input", "weight", "bias")),
}
_METADATA_ONLY = {"__get__", "dim", "ndimension", "size", "numel", "is_floating_point", "has_names", "stride", "is_contiguous"}


def _subtracted_biases(recording: _Recording) -> Iterator[tuple[int, object]]:
    """(id of the bias, key of the norm) for each biased output whose only reader is a norm that reads nothing else."""
    calls = [id(key) for key in recording.norms]
    for tensor, bias in recording.biases.items():
        readers = recording.readers.get(tensor, [])
        if len(readers) == 1 and calls.count(id(readers[0])) == 1 and len(recording.readers[bias]) == 1:
            yield bias, readers[0]


def _record(model: torch.nn.Module, example: Tree, training: bool) -> _Recording:
    """Run the model on `example` and record its operations."""
    from torch.overrides import TorchFunctionMode

    recording = _Recording()

    class Calls(TorchFunctionMode):
        def __torch_function__(
            self, func: Callable[..., Tree], types: object, args: tuple[Tree, ...] = (), kwargs: dict[str, Tree] | None = None
        ) -> Tree:
            out = func(*args, **(kwargs or {}))
            recording.call(func, args, kwargs or {}, out, training)
            return out

    with Calls():
        result = run_once(model, example, training=training)
    recording.read(result)
    return recording
