"""The base of every model option: the network, its initial weights, and the choice of trained parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from drivetrain.core.errors import OperatorGives, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine.guards import device_bytes, memory_bytes, model_within
from drivetrain.core.machine.paths import expanded
from drivetrain.core.options import groups
from drivetrain.core.options import horizon as horizons
from drivetrain.core.options.allowed import EPOCHS, NAME_PATTERN, Entries, NamePattern, flatten
from drivetrain.core.options.option import BuildContext, NonNegative, Option, RunSpec
from drivetrain.core.step.step import Step, WrappingStep
from drivetrain.core.step.trees import named_leaves
from drivetrain.core.user.call import ProgressView, UserCall

NO_START: dict[str, Any] = {
    "weights": None,
    "weights_skip": (),
    "freeze": (),
    "unfreeze": {},
    "embedding_noise": 0.0,
}  # True for a finished run

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Model(Option, groups.Model):
    """An option that builds a network for the data's shape and classes.

    `weights` is a file or a run to start from, except names that match `weights_skip`. Parameters that match `freeze` do
    not train; `unfreeze` makes some of them train after a given length of training. `embedding_noise` is NEFTune's.
    """

    changes = "trains another network"
    weights: str | None = None
    weights_skip: Sequence[NamePattern] = ()
    freeze: Sequence[NamePattern] = ()
    unfreeze: Annotated[dict[str, Any], Entries(NAME_PATTERN, ((NAME_PATTERN, EPOCHS),))] = field(default_factory=dict)
    embedding_noise: NonNegative = 0.0

    stage_keys: ClassVar[tuple[str, ...]] = ("freeze", "unfreeze", "unfreeze.*", "*drop*")
    why_fixed: ClassVar[str] = "the weights continue in the next stage, so the architecture stays"
    pixels: ClassVar[bool | None] = False  # True if it has an output for each pixel of an image; None: unknown
    takes_trees: ClassVar[bool] = False  # True if a forward may take several inputs
    machine_local_keys: ClassVar[tuple[str, ...]] = ("weights",)
    identifying_keys: ClassVar[tuple[str, ...]] = ("weights",)

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.data.tokens and self.tokens is False:
            yield f"{run.named('model')} does not read sequences of tokens, which {run.named('data')} gives: set model=gpt"
        if self.tokens and run.data.tokens is False:
            yield (
                f"{run.named('model')} reads sequences of tokens, which {run.named('data')} does not give: "
                "set task=language_modelling, which has such data, or another model"
            )
        data, masks = run.named("data"), run.data.targets == "mask"
        if masks and self.pixels is False:
            yield f"{run.named('model')} gives one output for an image, but {data} has a class for each pixel: set model=unet"
        if self.pixels and not masks and run.data.targets is not None:
            yield f"{run.named('model')} is for masks, and {data} has none: set task=segmentation, or another model"
        if self.embedding_noise and not (self.tokens or run.data.tokens):
            yield f"model.embedding_noise is added to the embeddings of tokens, and {run.named('data')} gives none: set it to 0"
        yield from self._weights_problems(run)

    def input_problem(self, inputs: object) -> str:
        """The reason why the model cannot take two samples' inputs, "" if it can; own data shows its inputs only when read."""
        if self.tokens is None or not isinstance(inputs, torch.Tensor):
            return ""
        shape = tuple(inputs.shape[1:])
        if self.tokens and inputs.is_floating_point():
            return f"reads sequences of tokens, and cannot take the numbers of shape {shape}"
        if not self.tokens and inputs.dtype in (torch.int32, torch.int64):
            return f"does not read tokens, and cannot take the whole numbers of shape {shape}"
        return ""

    def _weights_problems(self, run: RunSpec) -> Iterator[str]:
        """Problems of the initial weights and of the frozen parameters."""
        if self.weights_skip and self.weights is None:
            yield OperatorGives("model.weights_skip leaves out names of model.weights, which is not set: set model.weights=PATH")
        starts = flatten(self.unfreeze)
        for pattern, length in starts.items():
            if isinstance(length, bool) or not isinstance(length, int | float | str):
                yield f"model.unfreeze: {pattern}={length}: give the length of training after which it trains, such as 500 or 2ep"
            else:
                yield from horizons.length_problem(f"model.unfreeze.{pattern}", length)
        if starts and not self.freeze:
            yield (
                "model.unfreeze says when frozen parameters begin to train, and none is frozen: set model.freeze too, such as "
                "model.freeze=[*]"
            )
        if starts and (run.compile.captures_step or run.compile.cuda_graphs or run.compile.torchscript):
            yield (
                f"model.unfreeze and {run.named('compile')} exclude each other (a graph keeps the gradients that it was captured "
                "with): set compile=inductor"
            )
        if starts and not run.parallel.can_unfreeze:
            yield (
                f"model.unfreeze and {run.named('parallel')} exclude each other (its gradients are laid out once, for the "
                "parameters that train from the start): set parallel=ddp parallel.find_unused_parameters=true"
            )

    def build(self, context: BuildContext) -> torch.nn.Module:
        """The network for the run's data, on its device, with its initial weights.

        Raises UserError if it does not take inputs of this structure.
        """
        inputs = context.data.two_samples(context.device)
        if not self.takes_trees and not isinstance(inputs, torch.Tensor) and (parts := named_leaves(inputs)):
            raise UserError(
                f"{context.run.named('model')} takes one tensor, and the inputs of a sample are several "
                f"({', '.join(name for name, _ in parts)}): set model=own, with a network whose forward takes them"
            )
        if context.without_values is not None:
            with context.without_values:
                return self.create_for(context).to(context.device)
        most, where, copies = min(self._room(context))
        beside = f", with {copies - 1} times as much for gradients and the optimizer's state" if copies > 1 else ""
        with model_within(most, context.run.named("model"), beside, where):
            model = self.create_for(context)
        # On every rank alike, and before any edit, because a file has the names and shapes of the new model. So edits that remove
        # biases account for the file's, float32 weights become exact masters, and shards are cut from whole tensors. A resumed
        # run has the weights of its checkpoint.
        if self.weights is not None and not context.parallel.broadcast_object(context.resumed):
            from drivetrain.model import weights

            data, path = context.data, expanded(self.weights)
            for line in weights.load_into(model, path, self.weights_skip, data.shape, data.classes):
                logger.info(line)
        if self.embedding_noise and context.trains:
            from drivetrain.model import noise

            noise.add(model, self.embedding_noise)
        return model.to(context.device)

    def _room(self, context: BuildContext) -> Iterator[tuple[int, str, int]]:
        """Yield for each memory the bytes of parameters that fit, its name, and the smallest number of copies in it.

        In training the copies include gradients and the optimizer's state. Each rank of a machine creates the whole model in
        the machine's memory, and then moves it to its device.
        """
        all_train = context.trains and context.parallel.whole_model and not context.precision.frees_weights
        all_train = all_train and not self.freeze and not context.run.adapter.active
        states = 0 if context.parallel.shard_optimizer else context.run.optimizer.states
        copies = 2 + states if all_train else 1
        on_device = device_bytes(context.device)
        in_memory = copies if context.device.type == "cpu" else 1
        yield memory_bytes() // (in_memory * context.world.local_size), "this machine", in_memory
        if on_device is not None:
            yield on_device // copies, str(context.device), copies

    def tokenizer_files(self) -> tuple[Path, Mapping[str, Any]]:
        """Return the file tokenizer.json of the model's own tokenizer, and its settings. Raises UserError."""
        raise self.unwritten("tokenizer_files")

    @property
    def given_weights(self) -> bool:
        """True if training starts from given weights, not from random ones."""
        return self.weights is not None

    def untrained(self) -> Model:
        """Return this option for a finished run: without initial weights, nothing frozen."""
        return replace(self, **NO_START)

    def create_for(self, context: BuildContext) -> torch.nn.Module:
        """A freshly initialised network for the run's data."""
        return self.create(context.data.shape, context.data.classes)

    def create(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """A freshly initialised network for samples of `shape` (without the batch dimension), with `classes` outputs."""
        raise self.unwritten("create")

    def freeze_parameters(self, model: torch.nn.Module, context: BuildContext) -> Iterator[str]:
        """Set requires_grad=False on parameters that never train. Returns lines to log; raises UserError if nothing trains."""
        freeze = context.run.adapter.frozen(model) or self.freeze
        if not freeze:
            return iter(())
        from drivetrain.model import freezing

        return freezing.freeze(model, self._schedule(model, context, freeze))

    def trained(self, model: torch.nn.Module, context: BuildContext) -> list[str]:
        """Return the names of parameters that train at any time. Raises UserError for patterns that match nothing."""
        from drivetrain.model import freezing

        freeze, names = context.run.adapter.frozen(model) or self.freeze, list(dict(model.named_parameters()))
        return freezing.trained(names, self._schedule(model, context, freeze)) if freeze else names

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        """Return the step, wrapped if parameters begin to train later or a method of the model runs after updates."""
        if self.unfreeze:
            from drivetrain.model import freezing

            schedule = self._schedule(context.model, context, self.freeze)
            step = freezing.UnfreezingStep(step, freezing.Unfreezing(context.model, schedule), context.progress)
        own = getattr(context.model, "after_update", None)
        if own is None:
            return step
        setting = f"after_update of {context.run.named('model')}"
        if context.precision.owns_weights:
            raise UserError(
                f"{setting} would change the weights, and {context.run.named('precision')} trains copies of them: set "
                "precision=bf16"
            )
        call = UserCall(setting, own, offers=("progress",), positions=("progress",), decides=("progress",))
        made = ProgressView(context.progress, context.horizon.updates, context.run.values["epochs"], training=True, _more=1)
        return AfterUpdateStep(step, lambda: call(progress=made))

    def _schedule(self, model: torch.nn.Module, context: BuildContext, freeze: Sequence[str]) -> Any:
        from drivetrain.model import freezing

        return freezing.Schedule(list(dict(model.named_parameters())), freeze, flatten(self.unfreeze), context.horizon)


@dataclass(eq=False)
class AfterUpdateStep(WrappingStep):
    """Calls a method of the user's model after each completed update, such as to average a teacher or to bound weights."""

    call: Callable[[], None]

    def update(self) -> bool:
        made = bool(self.inner.update())
        if made:
            with torch.no_grad():
                self.call()
        return made


# A subclass's constructor may not call this class's. The defaults are then class attributes.
Model.unfreeze = {}
