"""The user's own Dataset."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, RunSpec
from drivetrain.data.base import Data, Normalize, Splits, measured


class Own(Data):
    """The user's own map-style Dataset, `target`, of a package named in `trust`: `dataset[i]` is (x, y).

    It is made twice, with `kwargs` and those of `train` or `test`; without these it is asked for by split= or train=.
    """

    machine_local_keys = ("target",)
    peak = None

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
                f"if you trust it, say trust=[{self.target.split('.')[0]}] on the command line"
            )
        if (self.train is None) != (self.test is None):
            yield "data.train and data.test belong together: give both, or neither"

    def load(self, device: torch.device) -> Splits:
        made = self._imported()
        train, test = (OwnSource(self._made(made, split), f"data.target={self.target}") for split in ("train", "test"))
        x, _ = train.fetch(torch.tensor([0]))
        names = getattr(train.dataset, "classes", None)
        classes = self.classes or getattr(train.dataset, "num_classes", None) or names
        if isinstance(classes, list | tuple):
            classes = len(classes)
        if not isinstance(classes, int) or classes < 1:
            raise UserError(f"data.target={self.target} does not say how many classes it has (num_classes): set data.classes")
        whole = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        return Splits(train, test, tuple(x.shape[1:]), classes, self._normalizing(train, x), list(names or ()) if whole else None)

    def _imported(self) -> Any:
        module, _, name = str(self.target).rpartition(".")
        try:
            made = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"data.target={self.target} cannot be imported: {error}") from None
        if not callable(made):
            raise UserError(f"data.target={self.target} is {type(made).__name__}: name a class, or a function that makes one")
        return made

    def _made(self, made: Any, split: str) -> Any:
        """The Dataset of a split. Raises UserError."""
        kwargs = {**self.kwargs, **self._chooses(made, split)}
        try:
            dataset = made(**kwargs)
        except TypeError as error:
            raise UserError(f"data.target={self.target} cannot be built with {sorted(kwargs)}: {error}") from None
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"data.target={self.target} has no __len__ and __getitem__: it has to be a map-style Dataset, "
                "for the order of the samples is the run's"
            )
        if not len(dataset):
            raise UserError(f"data.target={self.target} has no {split} samples (made with {kwargs})")
        return dataset

    def _chooses(self, made: Any, split: str) -> dict[str, Any]:
        """What makes it the training or the test set."""
        given = self.train if split == "train" else self.test
        if given is not None:
            return given
        takes = inspect.signature(made).parameters
        if "split" in takes:
            return {"split": split}
        if "train" in takes:  # as torchvision's
            return {"train": split == "train"}
        raise UserError(
            f"data.target={self.target} takes neither split nor train: say what makes each set by data.train and data.test, "
            "such as +data.train.folder=a +data.test.folder=b"
        )

    def _normalizing(self, source: OwnSource, x: torch.Tensor) -> Normalize | None:
        if not self.normalize or x.dtype != torch.uint8 or x.dim() != 4:
            return None
        count = min(len(source), 500)
        return measured(source.fetch(torch.arange(count) * (len(source) // count))[0])


class OwnSource:
    """A map-style Dataset as a source."""

    def __init__(self, dataset: Any, called: str) -> None:
        self.dataset, self.called = dataset, called

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
                f"{self.called}: samples {chosen[:4]} … do not make a batch of (x, y) ({error}): "
                "give tensors, arrays or numbers of one shape"
            ) from None
