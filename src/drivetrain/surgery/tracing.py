"""Following a batch through a model, operation by operation, whatever its modules are called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from drivetrain.core.lazy import torch


@dataclass
class _Trail:
    """One batch's way: what made each tensor, and what read it. Tensors go by their ids, which `alive` keeps unique."""

    made: dict[int, int] = field(default_factory=dict)  # tensor → the bias that was added to its channels
    reads: dict[int, list[Any]] = field(default_factory=dict)  # tensor → its readers: a norm's key, or None for any other
    norms: list[Any] = field(default_factory=list)  # a key for each call: its running mean, or the call itself
    alive: list[Any] = field(default_factory=list)

    def read(self, value: Any, reader: Any = None) -> None:
        for tensor in _tensors(value):
            self.alive.append(tensor)
            self.reads.setdefault(id(tensor), []).append(reader)

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, training: bool) -> None:
        named = dict(zip(_NAMES.get(function.__name__, ()), args, strict=False)) | kwargs
        if function is torch.nn.functional.batch_norm:
            subtracts = named["training"] or not training  # one that is frozen in training has no mean of its own to subtract
            self.norms.append(key := named["running_mean"] if named["running_mean"] is not None else object())
            self.read(named.pop("input"), key if subtracts else None)
            self.read(named)
        elif any(True for _ in _tensors(out)) or function.__name__ not in _LOOKS_ONLY:
            bias, weight = named.get("bias"), named.get("weight")
            # Channels are the second dimension to a norm; a convolution has them there, a linear layer has them last.
            if bias is not None and weight is not None and out.ndim == weight.ndim:
                self.alive.append(out)
                self.made[id(out)] = id(bias)
            self.read((args, kwargs))


_NAMES: dict[str, tuple[str, ...]] = {
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "linear"), ("input", "weight", "bias")),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), ("input", "weight", "bias")),
}
_LOOKS_ONLY = {"__get__", "dim", "ndimension", "size", "numel", "is_floating_point", "has_names", "stride", "is_contiguous"}


def before_norm(model: torch.nn.Module, example: torch.Tensor) -> list[tuple[torch.nn.Parameter, torch.Tensor | None]]:
    """Biases that one batch norm subtracts again at once, each with that norm's running mean if it keeps one.

    They are such in evaluation and in training: dropout, say, shows only there. The model is left as it was.
    """
    owners = [id(p) for module in model.modules() for p in module._parameters.values() if p is not None]
    parameters = {id(p): p for p in model.parameters() if owners.count(id(p)) == 1}
    evaluated, trained = (dict(_pairs(_trail(model, example, training))) for training in (False, True))
    return [
        (parameters[bias], mean if isinstance(mean, torch.Tensor) else None)
        for bias, mean in trained.items()
        if bias in evaluated and bias in parameters
    ]


def _pairs(trail: _Trail) -> Iterator[tuple[int, Any]]:
    """(bias, key of the norm) where the norm alone reads what the bias was added to, and norms nothing else."""
    calls = [id(key) for key in trail.norms]
    for tensor, bias in trail.made.items():
        readers = trail.reads.get(tensor, [])
        if len(readers) == 1 and calls.count(id(readers[0])) == 1 and len(trail.reads[bias]) == 1:
            yield bias, readers[0]


def _trail(model: torch.nn.Module, example: torch.Tensor, training: bool) -> _Trail:
    from torch.overrides import TorchFunctionMode

    trail = _Trail()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            trail.called(func, args, kwargs or {}, out, training)
            return out

    with left_as_it_was(model, example.device), torch.no_grad():
        model.train(training)
        with Watch():
            result = model(example)
        trail.read(result)
    return trail


@contextmanager
def left_as_it_was(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Modes, buffers and random streams come back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer
                buffer.copy_(before)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
