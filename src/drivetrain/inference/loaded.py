"""`drivetrain.load`: a finished run's model, its transforms and its classes, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch

from drivetrain.config import validate as check
from drivetrain.core.errors import UserError
from drivetrain.core.machine import isolation, torch_patches
from drivetrain.core.step.target_kinds import DESCRIPTIONS, TargetKind
from drivetrain.core.step.trees import Tree, described, first
from drivetrain.core.world import World
from drivetrain.data import Data
from drivetrain.data.base import Splits
from drivetrain.engine import build
from drivetrain.engine.context import RunContext
from drivetrain.engine.summary import describe, recall
from drivetrain.inference.finished import MODEL_ALONE, ONE_PROCESS, Choice, Finished, find, load_weights
from drivetrain.inference.inputs import SampleBlock, of_source
from drivetrain.inference.predictions import Predictions
from drivetrain.inference.transforms import Transforms
from drivetrain.saving import manifest

# Errors of a model that was built for other data or gets other inputs.
MISFITS = (ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
KNOWN = (UserError, torch.OutOfMemoryError)  # those with a sufficient message


class LoadedRun:
    """A finished run, ready to predict."""

    def __init__(self, finished: Finished, model: torch.nn.Module, data: Splits, context: RunContext) -> None:
        self.run_dir, self.update = finished.run_dir, int(finished.checkpoint.name)
        self.model = model  # in evaluation mode, on `device`
        self.device = context.device
        option = Data.of(finished.job.run)
        self.about = manifest.about(finished.checkpoint) or describe(finished.job.run, data)
        decodes = self.about["decodes_images"] if "decodes_images" in self.about else option.decodes_images()
        self.transforms = Transforms(option, data, decodes, context.device, context.memory_format)
        self.run, self.data, self._precision = finished.job.run, data, context.precision
        names = self.about["classes"]
        # The names of the outputs: classes or labels; their numbers without names.
        self.classes: list[str] = list(names) if names is not None else [str(n) for n in range(self.about["outputs"])]
        # The kind of prediction, by the data's `targets`: class, labels, values, tokens, …
        self.kind: TargetKind = self.about["targets"] or self.run.loss.takes[0]
        self._units = data.units and data.units.to(context.device)
        self._settings = isolation.settings()  # torch's global settings, as in the run
        self._measured = context.model_call.measured
        self._forward = context.model_call.taking_batches(model)

    def predict(self, x: object) -> Predictions:
        """Predict a batch: a tensor or array (n, …) of samples in the data set's form, or paths of files.

        They are resized, encoded and normalised as in the run's own evaluation. Raises UserError if they do not fit.
        """
        with isolation.isolated(self._settings):
            return self.predict_ready(self.transforms(x))

    def predict_ready(self, x: object) -> Predictions:
        """Predict a batch from `transforms`. Raises UserError if the model cannot take it."""
        try:
            with self.computing():
                output = self._measured(self._forward(x))
        except MISFITS as error:
            if isinstance(error, KNOWN):
                raise
            raise UserError(
                f"{self.run.named('model')} of {self.run_dir} cannot take the input ({_first_line(error)}): the input is not "
                "like those that it was trained on, or the run's files were changed"
            ) from error
        if not isinstance(output, torch.Tensor):
            raise UserError(
                f"{self.run.named('model')} of {self.run_dir} returns {described(output)}, but a prediction is one tensor: name "
                "a part of it by forward_output"
            )
        return Predictions.of(output, self.kind, self.classes, self._units)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context in which the model computes as in the run's own evaluation."""
        wide = torch_patches.wide_convolutions(self.device)
        with isolation.isolated(self._settings), torch.no_grad(), wide, self._precision.autocast():
            yield

    def example(self) -> Tree:
        """A batch of two zeros in the form of `transforms`."""
        return self.data.two_samples(self.device)

    def batch_size(self) -> int:
        """The number of samples of a batch of the run's own evaluation on one process."""
        return int(self.run.values["evaluate_batch"] or self.run.batch.micro_batch(World()))

    def check_rows(self, split: str | None) -> None:
        """Raise UserError if the predictions do not fit in the rows of a table."""
        if self.kind in ("mask", "words", "pair", "sequence"):
            raise UserError(
                f"{self.run.named('data')} has {DESCRIPTIONS[self.kind]}, which does not fit in a row: use drivetrain.load"
            )
        if split is not None and self.kind == "tokens":
            raise UserError(
                f"--data {split}: {self.run.named('data')} has a target at each token: drivetrain evaluate sums them up"
            )

    def blocks_of(self, split: str, size: int) -> tuple[Iterator[SampleBlock], int]:
        """The samples of the run's own training, validation or test set, and their number; several sets follow one another.

        Raises UserError.
        """
        data = Data.of(self.run).load_sets(torch.device("cpu"))
        manifest.check_classes(self.about, describe(self.run, data))
        sets = {"": data.train} if split == "train" else data.sets(split)
        if not sets:
            raise UserError("--data validation: this run has no validation set (data.validation=null): give --data test")
        found = [of_source(source, f"{split}/{name}" if name else split, size) for name, source in sets.items()]
        return chain.from_iterable(blocks for blocks, _ in found), sum(count for _, count in found)

    def text_of(self, x: Tree) -> str | None:
        """The text of an input's tokens; None if the run's data option cannot decode them."""
        text: str | None = Data.of(self.run).decode(first(x).flatten().tolist(), self.data)
        return text

    def in_units(self, target: torch.Tensor) -> torch.Tensor:
        """A target of the run's data in the units of its column."""
        return self._units.to(torch.device("cpu"))(target) if self._units is not None else target

    def name_target(self, target: Tree) -> object:
        """A target of the run's data as text: a class by its name, labels joined by ";", one number in its units."""
        if target is None:
            return None
        if self._units is not None:
            target = self.in_units(torch.tensor(target)).tolist()
        if self.kind == "class":
            return self.classes[target]
        if self.kind == "labels":
            return ";".join(name for name, on in zip(self.classes, target, strict=True) if on)
        return target[0] if isinstance(target, list) and len(target) == 1 else str(target) if isinstance(target, list) else target

    def __repr__(self) -> str:
        return f"<{type(self.model).__name__} of {self.run_dir}, update {self.update}: {len(self.classes)} outputs>"


def load(
    run_dir: Path | str,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str] = (),
    choice: Choice | None = None,
    with_data: bool = False,
) -> LoadedRun:
    """Load a finished run's model for `drivetrain.load`; `with_data` if samples of its data are read. Raises UserError."""
    used = (*MODEL_ALONE, "data") if with_data else MODEL_ALONE
    return open_run(find("drivetrain predict", Path(run_dir), [ONE_PROCESS, "ema=none", *overrides], config_dirs, choice, used))


def open_run(finished: Finished) -> LoadedRun:
    """Build the model of a finished run, and load its weights. Raises UserError."""
    run = finished.job.run
    check.validate_device(run, finished.used)
    about = manifest.about(finished.checkpoint)
    with isolation.isolated():
        context = RunContext(run, World(), finished.run_dir)
        data = recall(about, finished.run_dir) if about else Data.of(run).load(torch.device("cpu"))
        try:
            model = build.build_for_inference(context, data)
        except MISFITS as error:
            if not about or isinstance(error, KNOWN):
                raise
            raise UserError(
                f"{run.named('model')} cannot be built for the data that {finished.checkpoint / 'manifest.json'} describes "
                f"({_first_line(error)}): the file was changed, or the model's code was"
            ) from error
        load_weights(model, finished.weights())
        return LoadedRun(finished, model.requires_grad_(False), data, context)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")
