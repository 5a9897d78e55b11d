"""Edits of the model before training. Each returns one line that says what it changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from drivetrain.errors import UserError
from drivetrain.lazy import torch
from drivetrain.spec import Part, Run


class Edit(Part):
    """One model edit; surgery=[] is the off switch."""

    memory_format: str | None = None  # of the inputs that the edited model wants

    def apply(self, model: torch.nn.Module, example: torch.Tensor) -> str:
        """Edit the model in place. `example` is a batch of two zeros on the model's device."""
        raise NotImplementedError


class ChannelsLast(Edit):
    """Weights and images in NHWC order, which convolution kernels read faster; nothing for transformers."""

    memory_format = "channels_last"

    def verify(self, run: Run) -> Iterator[str]:
        shape = run.data.shape()
        if shape is not None and len(shape) != 3:
            yield f"surgery=[channels_last] wants images, but the data gives {list(shape)}: leave it out"

    def apply(self, model: torch.nn.Module, example: torch.Tensor) -> str:
        model.to(memory_format=torch.channels_last)
        return f"{sum(p.ndim == 4 for p in model.parameters())} weights in channels-last order"


class NoBiasBeforeNorm(Edit):
    """Remove biases that a BatchNorm subtracts again at once, whatever the modules are called.

    Found by following one batch through the model: the layer's output goes into a BatchNorm and nowhere else. The
    bias is folded into the running mean, so that outputs stay the same in evaluation too.
    """

    def apply(self, model: torch.nn.Module, example: torch.Tensor) -> str:
        removed = []
        for layer, norm in _feeding_a_norm(model, example):
            if norm.running_mean is not None:
                norm.running_mean -= layer.bias.detach()
            layer.bias = None
            removed.append(layer)
        return f"{len(removed)} biases before a BatchNorm removed"


def _feeding_a_norm(model: torch.nn.Module, example: torch.Tensor) -> list[tuple[Any, Any]]:
    """Pairs (layer with a bias, the one BatchNorm that is the only reader of its output)."""
    from torch.overrides import TorchFunctionMode

    layers = (torch.nn.modules.conv._ConvNd, torch.nn.Linear)
    made_by: dict[int, Any] = {}  # id of a tensor → the layer that made it
    readers: dict[int, list[Any]] = defaultdict(list)  # id of a tensor → what read it: a norm, or None for anything else
    alive: list[Any] = []  # keeps every id unique while we watch
    norm_now: list[Any] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") not in _LOOKS_ONLY:
                for tensor in _tensors((args, kwargs)):
                    readers[id(tensor)].append(norm_now[-1] if norm_now and func is torch.nn.functional.batch_norm else None)
            return func(*args, **(kwargs or {}))

    def entered(norm: Any, _: Any) -> None:
        norm_now.append(norm)

    def left(module: Any, _: Any, output: Any) -> None:
        if isinstance(module, layers):
            made_by[id(output)] = module
            alive.append(output)
        else:
            norm_now.pop()

    norm_class = torch.nn.modules.batchnorm._BatchNorm
    handles = []
    for module in model.modules():
        if isinstance(module, norm_class):
            handles.append(module.register_forward_pre_hook(entered))
        if isinstance(module, (norm_class, *layers)):
            handles.append(module.register_forward_hook(left))
    training = model.training
    try:
        model.eval()
        with torch.no_grad(), Watch():
            result = model(example)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    for tensor in _tensors(result):
        readers[id(tensor)].append(None)

    feeds: dict[Any, list[Any]] = defaultdict(list)
    for tensor_id, layer in made_by.items():
        feeds[layer] += readers[tensor_id] or [None]
    calls = [norm for norms in feeds.values() for norm in norms]
    pairs = []
    for layer, norms in feeds.items():
        norm = norms[0]
        sole = len(norms) == 1 and norm is not None and calls.count(norm) == 1
        if sole and layer.bias is not None and isinstance(norm, norm_class) and len(layer.bias) == norm.num_features:
            pairs.append((layer, norm))
    return pairs


_LOOKS_ONLY = {
    "__get__",
    "dim",
    "size",
    "numel",
    "is_floating_point",
    "has_names",
}  # read a tensor's form, not its values


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def apply_all(edits: list[Edit], model: torch.nn.Module, example: torch.Tensor) -> list[str]:
    """Apply the edits in the order given; what each changed. Raises UserError for one that found nothing to change."""
    said = []
    for edit in edits:
        line = edit.apply(model, example)
        if line.startswith("0 "):
            raise UserError(f"surgery has no effect on this model ({line}): leave {type(edit).__name__} out")
        said.append(line)
    return said
