"""What every data option gives: a training and a test source, read a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import annotated_types

from drivetrain.core.lazy import torch
from drivetrain.core.option import Option
from drivetrain.core.tensors import Tensors as Tensors

IGNORED = -100  # a target that counts nothing: torch's own ignore_index
Fraction = Annotated[float, annotated_types.Gt(0), annotated_types.Lt(1)]


class Source(Protocol):
    """Samples that can be read by index, a batch at once.

    One that decodes image files says `crops = True` and takes a second argument, `boxes`: what to cut out of each
    image, as a function of its width and height (augment.Box), or None.
    It also says by `undecoded(index, box)` where to find a sample's file and what is wanted of it (decoding.Decoding).
    A source may also have `order(seed, epoch)`, indices (n,): each once, in the order that training takes in that epoch.
    Without it that is a permutation of them all. And `skipped()`: the names of samples that could not be read.
    Sequences have `lengths` (n,), the tokens each one counts in the loss, known without reading it. Their `fetch`
    takes a second argument, `pad_to`: it pads a batch on the right, up to a multiple of that or to the longest sample there is,
    with targets of IGNORED.
    """

    def __len__(self) -> int: ...

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (n, …) and targets (n,) of the samples `indices` (n,)."""
        ...


@dataclass
class Splits:
    """A data option, read: both sources, and what a model must know of them."""

    train: Source
    test: Source
    shape: tuple[int, ...]  # of one input
    classes: int
    normalize: Normalize | None
    names: Sequence[str] | None = None  # of the classes, where they have any
    dtype: torch.dtype | None = None  # of the inputs, where they are no floats


class Normalize:
    """uint8 or float inputs to (x − mean) / std per channel, in float32."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() - self.mean).div_(self.std)  # float() of a float is no copy: the source keeps its values


class Data(Option):
    """The base of every data option."""

    drop_last: bool
    peak: float | None = 255.0  # the largest value of an input; None where there is no bound
    on_device = False  # samples are made where the model is
    mirrored_changes_label = False  # a mirrored image shows another class
    tokens = False  # samples are sequences of tokens, with a target for each; they may differ in length

    def load(self, device: torch.device) -> Splits:
        """Read what training needs. Raises UserError where the data is not there or not usable."""
        raise NotImplementedError

    def shape(self) -> tuple[int, ...] | None:
        """The shape of one input, where it is known before reading."""
        return None

    def decodes(self) -> bool:
        """Whether samples are image files that are decoded as they are read."""
        return False

    def train_samples(self) -> int | None:
        """How many samples an epoch has, where it is known before reading."""
        return None


def measured(x: torch.Tensor) -> Normalize:
    """Mean 0 and standard deviation 1 per channel on the training set, measured."""
    per_channel = x.double().transpose(0, 1).flatten(1)
    return Normalize(per_channel.mean(1).tolist(), per_channel.std(1).tolist())
