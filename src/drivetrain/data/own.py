"""The user's own torch Dataset."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, RunSpec
from drivetrain.data.base import Data, Normalize, Splits, measure_on_some


class Own(Data):
    """The user's own map-style Dataset `target`, of a package named in `trust`: `dataset[i]` is (x, y).

    It is built twice, with `kwargs` and the arguments in `train` or `test`; without these, with split= or train=.
    """

    machine_local_keys = ("target",)
    max_value = None
    targets = None

    def __init__(
        self,
        target: str | None = None,
        kwargs: dict[str, Any] | None = None,
        train: dict[str, Any] | None = None,
        test: dict[str, Any] | None = None,
        classes: Count | None = None,
        normalize: bool = True,
        drop_last: bool = True,
    ) -> None:
        self.target, self.kwargs, self.train, self.test = target, kwargs or {}, train, test
        self.classes, self.normalize, self.drop_last = classes, normalize, drop_last

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.target:
            yield "data=own needs data.target, the dotted name of your Dataset, such as my_pkg.Pictures"
        elif self.target.split(".")[0] not in run.values["trust"]:
            yield (
                f"data.target={self.target} is code that drivetrain does not ship: "
                f"if you trust it, set trust=[{self.target.split('.')[0]}] on the command line"
            )
        if (self.train is None) != (self.test is None):
            yield "data.train and data.test belong together: give both, or neither"

    def load(self, device: torch.device) -> Splits:
        target = self._import_target()
        train, test = (OwnSource(self._dataset(target, split), f"data.target={self.target}") for split in ("train", "test"))
        x, _ = train.fetch(torch.tensor([0]))
        names = getattr(train.dataset, "classes", None)
        classes = self.classes or getattr(train.dataset, "num_classes", None) or names
        if isinstance(classes, list | tuple):
            classes = len(classes)
        if not isinstance(classes, int) or classes < 1:
            raise UserError(f"data.target={self.target} does not say how many classes it has (num_classes): set data.classes")
        named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        shape, normalize = tuple(x.shape[1:]), self._normalization(train, x)
        return Splits(train, test, shape, classes, normalize, list(names or ()) if named else None)

    def _import_target(self) -> Any:
        """Import the class, or the function, that makes the Dataset. Raises UserError."""
        module, _, name = str(self.target).rpartition(".")
        try:
            target = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"data.target={self.target} cannot be imported: {error}") from None
        if not callable(target):
            raise UserError(f"data.target={self.target} is {type(target).__name__}: name a class, or a function that makes one")
        return target

    def _dataset(self, target: Any, split: str) -> Any:
        """Build the Dataset of a split. Raises UserError."""
        kwargs = {**self.kwargs, **self._split_arguments(target, split)}
        try:
            dataset = target(**kwargs)
        except TypeError as error:
            raise UserError(f"data.target={self.target} cannot be built with {sorted(kwargs)}: {error}") from None
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"data.target={self.target} has no __len__ and __getitem__: it must be a map-style Dataset, "
                "because the run chooses the order of the samples"
            )
        if not len(dataset):
            raise UserError(f"data.target={self.target} has no {split} samples (made with {kwargs})")
        return dataset

    def _split_arguments(self, target: Any, split: str) -> dict[str, Any]:
        """Return the arguments that make it the training or the test set. Raises UserError."""
        given = self.train if split == "train" else self.test
        if given is not None:
            return given
        takes = inspect.signature(target).parameters
        if "split" in takes:
            return {"split": split}
        if "train" in takes:  # as torchvision's
            return {"train": split == "train"}
        raise UserError(
            f"data.target={self.target} takes neither split nor train: give the arguments of each set in data.train and "
            "data.test, such as +data.train.folder=a +data.test.folder=b"
        )

    def _normalization(self, source: OwnSource, x: torch.Tensor) -> Normalize | None:
        return measure_on_some(source) if self.normalize and x.dtype == torch.uint8 and x.dim() == 4 else None


class OwnSource:
    """A map-style Dataset as a source."""

    def __init__(self, dataset: Any, setting: str) -> None:
        self.dataset, self.setting = dataset, setting

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = indices.tolist()
        many = getattr(self.dataset, "__getitems__", None)
        samples = many(chosen) if many is not None else [self.dataset[i] for i in chosen]
        try:
            x, y = zip(*samples, strict=True)
            return torch.stack([torch.as_tensor(v) for v in x]), torch.stack([torch.as_tensor(v) for v in y])
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"{self.setting}: samples {chosen[:4]} … do not make a batch of (x, y) ({error}): "
                "give tensors, arrays or numbers of one shape"
            ) from None
