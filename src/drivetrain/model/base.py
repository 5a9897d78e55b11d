"""The network: timm's by name, ours, or the user's own class."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, Momentum, Option, RunSpec


class Model(Option):
    """The base of every model option."""

    tokens: bool | None = False  # reads sequences of tokens; None: whatever it is given

    may_be_transformer = False

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.data.tokens and self.tokens is False:
            yield f"{run.named('model')} does not read sequences of tokens, which {run.named('data')} gives: set model=gpt"
        if self.tokens and not run.data.tokens:
            yield (
                f"{run.named('model')} reads sequences of tokens, which {run.named('data')} does not give: "
                "set data=stdlib loss=next_token, or another model"
            )

    def build(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """The network for inputs of `shape` and `classes` outputs, freshly initialised."""
        raise NotImplementedError


class Timm(Model):
    """Any of timm's networks, with any of its arguments in `kwargs`; input channels and classes come from the data."""

    may_be_transformer = True

    def __init__(self, name: str = "resnet18", pretrained: bool = False, kwargs: dict[str, Any] | None = None) -> None:
        self.name, self.pretrained, self.kwargs = name, pretrained, kwargs or {}

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        import timm

        base = self.name.split(".")[0]
        if not self.name.startswith("hf-hub:") and not timm.is_model(self.name):
            near = difflib.get_close_matches(base, timm.list_models(), n=5, cutoff=0.5)
            yield (f"model.name={self.name} is no model of timm {timm.__version__}: did you mean {', '.join(near) or 'another'}?")

    def build(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        import timm

        kwargs = {"in_chans": shape[0], "num_classes": classes, **self.kwargs}
        try:
            return timm.create_model(self.name, pretrained=self.pretrained, **kwargs)
        except TypeError as error:  # an argument that this network does not take
            raise UserError(f"model.name={self.name} does not take these model.kwargs {self.kwargs}: {error}") from None


class ResNet9(Model):
    """Nine convolutions with residuals: small images in seconds. `bias` keeps the convolutions' useless biases."""

    def __init__(self, width: Count = 16, bias: bool = False) -> None:
        self.width, self.bias = width, bias

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        shape = run.data.shape()
        if shape is not None and (len(shape) != 3 or min(shape[1:]) < 8):
            yield f"model=resnet9 wants images of at least 8×8, but the data gives {list(shape)}: set model=mlp"

    def build(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        from drivetrain.model.resnet9 import ResNet9

        return ResNet9(shape, classes, self.width, self.bias)


class Mlp(Model):
    """Linear layers with ReLU, on inputs of any shape."""

    def __init__(self, hidden: Sequence[Count] = (256, 256), dropout: Momentum = 0.0) -> None:
        self.hidden, self.dropout = hidden, dropout

    def build(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        from drivetrain.model.mlp import Mlp

        return Mlp(shape, classes, self.hidden, self.dropout)


class Gpt(Model):
    """A small decoder of text: a token is predicted from those before it (models.gpt states the architecture)."""

    tokens = True

    may_be_transformer = True

    def __init__(
        self,
        width: Count = 256,
        depth: Count = 4,
        heads: Count = 4,
        dropout: Momentum = 0.0,
        ngrams: Count = 1,
        buckets: Count = 8192,
    ) -> None:
        self.width, self.depth, self.heads, self.dropout = width, depth, heads, dropout
        self.ngrams, self.buckets = ngrams, buckets

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.width % (2 * self.heads):
            near = self.width // (2 * self.heads) * 2 * self.heads
            yield (
                f"model.width={self.width} does not divide into model.heads={self.heads} heads of an even width: "
                f"set model.width to {' or '.join(str(n) for n in (near, near + 2 * self.heads) if n)}"
            )

    def build(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        from drivetrain.model.gpt import Gpt

        return Gpt(shape[0], classes, self.width, self.depth, self.heads, self.dropout, self.ngrams, self.buckets)


class Own(Model):
    """The user's own class, `target`, of a package named in `trust`; `classes` and `shape` are passed if it takes them."""

    machine_local_keys = ("target",)
    tokens = None

    may_be_transformer = True

    def __init__(self, target: str | None = None, kwargs: dict[str, Any] | None = None) -> None:
        self.target, self.kwargs = target, kwargs or {}

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.target:
            yield "model=own needs model.target, the dotted name of your class, such as my_pkg.Net"
        elif self.target.split(".")[0] not in run.values["trust"]:
            yield (
                f"model.target={self.target} is code that drivetrain does not ship: "
                f"if you trust it, say trust=[{self.target.split('.')[0]}] on the command line"
            )

    def build(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        import inspect
        from importlib import import_module

        module, _, name = str(self.target).rpartition(".")
        try:
            target = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"model.target={self.target} cannot be imported: {error}") from None
        if not callable(target):
            raise UserError(f"model.target={self.target} is {type(target).__name__}: name a class, or a function that makes one")
        offered = {"shape": shape, "classes": classes, "num_classes": classes}
        takes = inspect.signature(target).parameters
        kwargs = {**{k: v for k, v in offered.items() if k in takes}, **self.kwargs}
        try:
            return target(**kwargs)
        except TypeError as error:
            raise UserError(f"model.target={self.target} cannot be built with {sorted(kwargs)}: {error}") from None
