"""loss=own: a function or a module of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from drivetrain.core.errors import OperatorGives, UserError, refuse
from drivetrain.core.lazy import torch
from drivetrain.core.options.allowed import Arguments
from drivetrain.core.options.option import BuildContext, RunSpec
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.target_kinds import DESCRIPTIONS
from drivetrain.core.step.trees import Forward, Tree, map_tensors
from drivetrain.core.user import code as user_code
from drivetrain.core.user.call import ProgressView, RunModel, UserCall
from drivetrain.loss.base import Loss, PartedLoss, wide
from drivetrain.loss.embedding import ComparingLoss, Gathered

OFFERS = ("output", "target", "input", "batch", "model", "progress", "phase")


class OwnLoss(PartedLoss):
    """The function or class `target` (a dotted name) of a package listed in `trust`; `kwargs` are its arguments.

    Its parameters select its arguments: output, target (or y), input (or x), batch, model, progress, phase; without output and
    model among them it gets (output, target) by position. It returns the mean over the samples, or a mapping of parts: training
    then uses `loss`, or without it the sum of the parts. For a mean over other items, give it a method `count(y)` with the number
    of averaged items: the mean is then exact over micro-batches and ranks.
    """

    machine_local_keys = ("target",)
    takes = tuple(DESCRIPTIONS)
    takes_trees = takes_whole = True
    _phase: str | None = None  # of the updates
    _phases: tuple[str, ...] = ()

    def __init__(self, target: str | None = None, kwargs: Arguments | None = None) -> None:
        super().__init__()
        self.target, self.kwargs = target, kwargs or {}

    def resolve(self, run: RunSpec) -> Self:
        if self.target_key != Loss.target_key:
            return self
        phases = tuple(run.values["phases"] or ())
        return self.with_values(_phases=phases, metrics=("loss", *(f"loss_{name}" for name in phases)))

    def of_phase(self, name: str) -> OwnLoss:
        return self.with_values(_phase=name)

    def validate(self, run: RunSpec) -> Iterator[str]:
        key = f"{self.target_key}.target"
        if not self.target:
            yield OperatorGives(f"loss=own needs {key}, the dotted name of your function or class, such as my_pkg.my_loss")
        else:
            yield from user_code.trust_problems(f"{key}={self.target}", self.target, run.values["trust"])

    def advise(self, run: RunSpec) -> Iterator[str]:
        if not run.parallel.own_forward:
            yield f"the parts of loss=own are not logged with {run.named('parallel')}: only the ranks of its last stage know them"
        if run.data.targets in ("class", "labels", "mask") and not run.metrics and self.target_key == Loss.target_key:
            yield (
                "loss=own reports the loss alone, and models are ranked by it: metrics=[accuracy] reports the share of right "
                "answers too, and select=accuracy ranks by it"
            )

    def build(self, context: BuildContext) -> Loss:
        built: OwnLoss = super().build(context)
        return OwnComparing.made_of(built, context) if getattr(built.function, "compares_samples", False) else built

    def setup(self, context: BuildContext) -> None:
        setting = f"{self.target_key}.target={self.target}"
        self.running, self.function = {}, self._made(setting, context.device)
        self._logs_parts = context.parallel.own_forward
        kwargs = self.kwargs if self.function is self._target else {}
        self._call = UserCall(setting, self.function, kwargs, offers=OFFERS)
        count = getattr(self.function, "count", None)
        self._count = count and UserCall(
            f"the method count of {setting}", count, offers=("target", "input", "batch"), positions=("target",),
            decides=("target", "batch"),
        )  # fmt: skip
        # The batch already counts plain samples, if it weights micro-batches by them.
        self.counted = count is not None or context.batch.weighs_by_length
        self.runs_model = "model" in self._call.needs
        if not self._call.positional and (problems := list(self._problems(setting, context))):
            raise UserError(problems)
        self._context = context
        length = (context.horizon.updates, context.run.values["epochs"])
        self._progress = {training: ProgressView(context.progress, *length, training) for training in (True, False)}

    def _problems(self, setting: str, context: BuildContext) -> Iterator[str]:
        """Yield the settings that exclude a loss that runs the model or reads the run's progress."""
        run = context.run
        if self.runs_model and self.target_key != Loss.target_key:
            yield (
                f"{setting} names `model` and is the whole training step: it cannot be added to other losses. Compute these in "
                "it, and let it return a mapping of parts"
            )
        if self.runs_model and not context.parallel.own_forward:
            yield (
                f"{setting} names `model`, and with {run.named('parallel')} no rank has a forward of the whole model: set "
                "parallel=ddp or fsdp"
            )
        if "progress" in self._call.needs and run.compile.captures_step:
            yield (
                f"{setting} names `progress`, which would be a constant in the graph of {run.named('compile')}: set "
                "compile=inductor"
            )

    def keeps(self) -> dict[str, object]:
        return {self.target_key: self.function}

    def _made(self, setting: str, device: torch.device) -> Callable[..., object]:
        """Import the target; make an object of it if it is a class. Raises UserError."""
        made: Callable[..., object]
        self._target = made = user_code.load(setting, str(self.target))
        if isinstance(made, type):
            made = user_code.make(setting, made, self.kwargs)
        if isinstance(made, torch.nn.Module):
            if any(p.requires_grad for p in made.parameters()):
                raise UserError(f"{setting} has parameters, and no optimizer sees those of a loss: move them to your model")
            made = made.to(device)
        if not callable(made):
            raise UserError(f"{setting} makes {type(made).__name__}, which cannot be called")
        return made

    def items(self, batch: MicroBatch) -> torch.Tensor:
        plain = self.count(batch.y)
        if self._count is None:
            return plain
        return torch.as_tensor(self._count(target=batch.y, input=batch.x, batch=batch), dtype=plain.dtype, device=plain.device)

    def step(self, forward: Forward, batch: MicroBatch) -> torch.Tensor:
        if self._call.positional:
            returned = self._call.function(forward(batch.x), batch.y)
        else:
            returned = self._returned(forward, forward(batch.x) if "output" in self._call.needs else None, batch, training=True)
        if isinstance(returned, torch.Tensor) and not returned.ndim:
            return returned
        parts = self._parts(returned)
        for name, value in parts.items():
            if name != "loss" and self._logs_parts:
                self.log(name if self._phase is None else f"{self._phase}_{name}", value * batch.weight)
        return parts["loss"]

    def evaluate(self, forward: Callable[[object], object], batch: MicroBatch, need_output: bool) -> tuple[Tree, torch.Tensor]:
        """The output, and the loss and each phase's loss times its items, with their number (metrics + 1,)."""
        output = forward(batch.x) if need_output or "output" in self._call.needs else None
        count = self.items(batch)
        with _evaluating(self.function):
            losses = [
                loss._parts(loss._returned(forward, output, batch, training=False))["loss"].to(count.dtype) * count
                for loss in (map(self.of_phase, self._phases) if self._phases else [self])
            ]
        return output, torch.stack([torch.stack(losses).sum(), *(losses if self._phases else ()), count])

    def _returned(self, forward: Callable[[object], object], output: object, batch: MicroBatch, training: bool) -> object:
        """The function's return value for a micro-batch."""
        model = self._model(forward) if self.runs_model else None
        returned = self._call(
            output=output, target=batch.y, input=batch.x, batch=batch, model=model, progress=self._progress[training],
            phase=self._phase,
        )  # fmt: skip
        if training and model is not None and not model.was_called and output is None:
            self._check_parts()
        return returned

    def _parts(self, returned: Any) -> dict[str, torch.Tensor]:
        """The named parts, with `loss`. Raises UserError if the function returned anything else."""
        parts = dict(returned) if isinstance(returned, dict) else {"loss": returned}
        for name, value in parts.items():
            if not isinstance(value, torch.Tensor) or value.dim() > 0:
                what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                named = f" as {name}" if isinstance(returned, dict) else ""
                raise UserError(
                    f"{self.target_key}.target={self.target} returned {what}{named}: "
                    "return a mean (a tensor without dimensions), or a mapping of several, one of them named loss"
                )
        if "loss" not in parts:
            parts["loss"] = torch.stack(list(parts.values())).sum()
        return parts

    def _model(self, forward: Callable[[object], object]) -> RunModel:
        run = self._context.run
        whole = "" if run.parallel.calls_parts else f"with {run.named('parallel')} each rank holds a part of the weights"
        graphs = run.compile.whole_forward and (run.compile.torchscript or run.compile.cuda_graphs)
        recorded = f"{run.named('compile')} has recorded it with its own" if graphs else ""
        return RunModel(forward, self._context.model, whole, recorded)

    def _check_parts(self) -> None:
        """Raise UserError if the loss never calls the whole model, but only the model's forward is compiled."""
        run = self._context.run
        if run.compile.whole_forward and not run.compile.captures_step:
            raise UserError(
                f"{run.named('compile')} compiles the model's forward, and {self.target_key}.target={self.target} calls only "
                "parts of the model: call model(…), or set compile=none"
            )


class OwnComparing(ComparingLoss, OwnLoss):
    """A user's loss over in-batch negatives, with `compares_samples = True`. It gets the samples of all ranks.

    An evaluation computes it within each `group` of consecutive samples, by default 16, for any number of ranks.
    """

    metrics, best = ("loss",), ("loss", min)
    _ragged: bool

    @classmethod
    def made_of(cls, own: OwnLoss, context: BuildContext) -> OwnComparing:
        """Return a prepared loss as one of this class. Raises UserError if the run excludes it."""
        from drivetrain.config.validate import problems_of

        made = cls(own.target, own.kwargs).with_values(**vars(own), group=getattr(own.function, "group", 16))
        ComparingLoss.setup(made, context)
        known = problems_of(context.run)
        refuse(problem for problem in problems_of(context.run.with_parts(loss=made)) if problem not in known)
        named = f"{made.target_key}.target={made.target}"
        if made.target_key != Loss.target_key:
            raise UserError(f"{named} compares samples, and cannot be added to other losses")
        if wrong := made._call.needs - {"output", "target", "progress"}:
            raise UserError(
                f"{named} names `{min(wrong)}`, and a loss that compares samples gets the output and the target of all of them: "
                "let the model return what it needs"
            )
        # A rank may have fewer samples than another, or a last micro-batch that only fills up the update.
        parts = context.batch.accumulation_steps * made.ranks
        made._ragged = not context.run.data.drop_last or context.batch.global_batch % parts > 0
        return made

    def embeddings(self, output: Tree) -> Tree:
        return map_tensors(lambda leaf: wide(leaf) if leaf.is_floating_point() else leaf, output)

    def over_all(self, embeddings: Tree, target: Tree, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._ragged:
            rows = valid.nonzero().flatten()
            embeddings, target = trees.select(embeddings, rows), trees.select(target, rows)
        progress = self._progress[torch.is_grad_enabled()]
        self._found = self._parts(self._call(output=embeddings, target=target, progress=progress))
        return self._found["loss"] * valid.sum(), valid.sum()

    def over_ranks(self, embeddings: Tree, own: Gathered) -> torch.Tensor:
        mean = super().over_ranks(embeddings, own)
        for name, value in self._found.items():
            if name != "loss":
                self.log(name, value)
        return mean

    def right(self, embeddings: Tree, target: Tree) -> Sequence[torch.Tensor]:
        return ()

    def evaluate(self, forward: Forward, batch: MicroBatch, need_output: bool) -> tuple[Tree, torch.Tensor]:
        with _evaluating(self.function):
            return super().evaluate(forward, batch, need_output)


@contextmanager
def _evaluating(function: object) -> Iterator[None]:
    """Put a module and its parts into evaluation mode, in which buffers do not change."""
    modules = [m for m in function.modules() if m.training] if isinstance(function, torch.nn.Module) else []
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True
