"""Records the first updates of a trainer. Trainer and step are the run's own, and are only observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ContextDecorator, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.batch import Batch
from drivetrain.checkpointing import Checkpointing
from drivetrain.compile import Compile
from drivetrain.core.machine.torch_patches import before_steps
from drivetrain.core.options.option import BuildContext, RunSpec
from drivetrain.core.options.selection import Figure
from drivetrain.core.step import streams, trees
from drivetrain.core.step.microbatch import MicroBatch, Request
from drivetrain.core.step.step import Stream, WrappingStep
from drivetrain.core.step.trees import Tree
from drivetrain.engine.trainer import Trainer
from drivetrain.measure.certify.judge import (
    FLOAT32,
    MARGIN,
    Array,
    Key,
    Trace,
    TracedRows,
    TracedTensor,
    of_numbers,
    of_rows,
    of_tensor,
    whole,
)
from drivetrain.parallel import Parallel
from drivetrain.precision import Precision

# Products also round inputs that are kept in a wider format.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "linear")


class Float64(Precision):
    """Weights, activations, gradients and optimizer state in float64. Data and first weights are the run's, converted."""

    full_float32 = False

    def setup(self, context: BuildContext) -> None:
        self._device = context.device

    def convert(self, model: torch.nn.Module, example: Tree) -> torch.nn.Module:
        model.double()
        model.register_forward_pre_hook(lambda _, args, kwargs: trees.cast((args, kwargs), torch.float64), with_kwargs=True)
        return model


def widen_loss(loss: object) -> None:
    """Convert a loss's tensors and modules, such as class weights or a teacher, to float64."""
    for name, value in vars(loss).items():
        if isinstance(value, torch.nn.Module):
            value.double()
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            setattr(loss, name, value.double())


@dataclass
class RandomRounding(TorchDispatchMode, ContextDecorator):
    """Changes the result of each operation by a random relative error of at most `roundoff` (Monte Carlo arithmetic).

    Parker 1997. Such a run differs from the exact one like a run in that number format, and shows the growth of errors.
    """

    roundoff: float
    seed: int
    paused: bool = field(default=False, init=False)  # while tensors are read

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func.overloadpacket.__name__ in PRODUCTS:
            args = tuple(self._rounded(a) for a in args)
        out = func(*args, **kwargs)
        if any(result.alias_info is not None for result in func._schema.returns):  # a view, or written in place
            return out
        return tuple(map(self._rounded, out)) if isinstance(out, tuple) else self._rounded(out)

    def _rounded(self, value: object) -> object:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float64 or not value.numel():
            return value
        noise = torch.rand(value.shape, generator=self._generator(value.device), dtype=torch.float64, device=value.device)
        return value * noise.mul_(2 * self.roundoff).add_(1 - self.roundoff)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]


@contextmanager
def watched_modules(recorder: TracingStep) -> Iterator[None]:
    """Within the context the inputs and outputs of the model's modules are recorded, a row for each sample."""
    model, calls = recorder.trainer.model, Counter[str]()
    update = forward = 0  # the recorded update, and its forward

    def begin(model: torch.nn.Module, args: object) -> None:
        nonlocal update, forward
        if model.training:
            forward = forward + 1 if update == recorder.attempt else 1
            update = recorder.attempt
            calls.clear()

    def keep(name: str, module: torch.nn.Module, *trees_of_call: object) -> None:
        """Keep the last value that a hook gets: the output of a module, or else its input."""
        calls[name] += 1
        if not model.training or not 1 <= forward <= len(recorder.batches):
            return  # an evaluation, or the second pass of a loss that takes two
        with recorder.looking():
            for number, leaf in enumerate(trees.leaves(trees_of_call[-1])):
                if leaf.ndim and leaf.is_floating_point() and not hasattr(leaf, "full_tensor"):
                    marks = (f" #{calls[name]}" if calls[name] > 1 else "") + (f" ({number})" if number else "")
                    recorder.add_rows("forward", name + marks, forward - 1, leaf)

    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(begin, prepend=True).remove)
        for name, module in model.named_modules():
            recorder.trace.kinds[name] = type(module).__name__
            if not any(True for _ in module.children()):
                hooks.callback(module.register_forward_pre_hook(partial(keep, f"input of {name}")).remove)
            hooks.callback(module.register_forward_hook(partial(keep, name)).remove)
        yield


EPOCHS = 2
PRIME = 2_654_435_761  # Knuth's multiplicative hash
MOST = 1 << 40  # bound of samples' hashes: sums of 8192 of them are exact in float64


def plan_of(requests: Iterable[Request], ranks: int) -> dict[str, Array]:
    """Return for each update of the first epochs the number of samples, their hash, and the sum of weights / ranks.

    All three are sums over the ranks.
    """
    counts, hashes, weights, epochs = [0.0], [0.0], [0.0], []
    for request in requests:
        if request.epoch >= EPOCHS:
            break
        if request.weight:
            indices = request.indices.numpy().astype(np.uint64)
            counts[-1] += len(indices)
            hashes[-1] += float(((indices + np.uint64(1)) * np.uint64(PRIME) % np.uint64(MOST)).sum())
            weights[-1] += request.weight / ranks
        if request.last:
            epochs.append(float(request.epoch))
            for sums in (counts, hashes, weights):
                sums.append(0.0)
    return {
        "number of updates": np.array([epochs.count(float(e)) / ranks for e in range(EPOCHS)]),
        "number of samples": np.array(counts[:-1]),
        "which samples": np.array(hashes[:-1]),
        "weights of the micro-batches": np.round(np.array(weights[:-1]), 9),
    }


EVALUATED_BATCHES = 8  # global batches of the evaluation set


@dataclass(frozen=True)
class RecordingOptions:
    """The options for recording a run."""

    updates: int
    permute: int = 0  # if not 0, each micro-batch has its samples in another order, by this seed
    float64: bool = False
    techniques: bool = False  # with float64: the run keeps its techniques, such as its compiler, instead of plain operations
    roundoff: float = 0.0  # with float64: the relative size of random rounding
    seed: int = 0
    gradients: bool = True  # whether they exist between a step's micro-batches and its update


def prepared(run: RunSpec, updates: int, **look: Any) -> tuple[RunSpec, RecordingOptions]:
    """The run to record instead, and its form: in float64 with all its techniques, or as plain operations.

    Plain operations run in one process, with the micro-batches of the run's steps and ranks.
    """
    if look.get("float64"):
        run = run.with_parts(precision=Float64())
        if not look.get("techniques"):
            batch = Batch.of(run).with_values(accumulation_steps=run.batch.accumulation_steps * run.parallel.data_ranks())
            run = run.with_parts(batch=batch, parallel=Parallel(), compile=Compile(), checkpointing=Checkpointing())
    return run, RecordingOptions(updates, gradients=not run.compile.captures_step, **look)


class TracingStep(WrappingStep):
    """The run's own step, with an observer of the stream, of the state before and after an update, and of the modules."""

    def __init__(self, trainer: Trainer, look: RecordingOptions) -> None:
        super().__init__(trainer.step)
        self.look, self.trace = look, Trace()
        self.noise = RandomRounding(look.roundoff, look.seed) if look.roundoff else None
        self.number = self.attempt = 1  # of the update; of attempts, skipped ones included
        self.rows: dict[Key, list[TracedRows]] = {}
        self.batches: list[tuple[int, torch.Tensor]] = []  # of the update so far: samples, and the indices of counted ones
        self.before: float | None = None  # the running sum of losses before this update, once it has begun
        evaluator, batches = trainer.evaluator, EVALUATED_BATCHES * trainer.batch.accumulation_steps
        self.trainer = replace(
            trainer,
            step=self,
            evaluator=replace(
                evaluator,
                forward=self.noise(evaluator.forward) if self.noise is not None else evaluator.forward,
                max_batches=evaluator.max_batches or batches * trainer.parallel.data_world.size,
            ),
            max_updates=min(look.updates, trainer.max_updates),
            stream_watchers=[*trainer.stream_watchers, self._watch],
        )

    def run(self) -> Trace | None:
        """Train the first updates and return their trace on rank 0; None on other ranks."""
        look, trainer, parallel = self.look, self.trainer, self.trainer.parallel
        for name, values in plan_of(trainer.requests(), parallel.data_world.size).items():
            self._add("samples", name, TracedTensor(values, 0.0, values.shape), 0)
        if look.float64:
            trainer.log.loss_sum = trainer.log.loss_sum.double()
            widen_loss(trainer.evaluator.loss)
        if trainer.compile_seconds() is None:  # else a compiler may trace the update
            before_steps(trainer.optimizer, self._before_optimizer)
        # The start of the run: changes are measured from there.
        self.first = {(phase, name): entry for phase, name, entry in self._changing()}
        for (phase, name), entry in self.first.items():
            if phase == "weights":
                self._add("start", name, entry, 0)
        gradients = "" if look.gradients else "gradients: the whole step is one graph"
        layers = "layers: the model is compiled" if trainer.compile_seconds() is not None else ""
        layers = layers if parallel.own_forward else "layers: each rank runs a part of the model"
        self.trace.unseen += filter(None, (gradients, layers))
        with nullcontext() if layers else watched_modules(self):
            trainer.fit()
        self._evaluation()
        if self.trace.random:
            modules = trainer.model.named_modules()
            drops = [name for name, m in modules if "drop" in type(m).__name__.lower() and getattr(m, "p", True)]
            self.trace.random = drops or ["the forward"]
        self.trace.notice = trainer.precision.notice()
        return self._merged(parallel.gather_object((parallel.data_world.rank, self.trace, self.rows)))

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        if self.before is None:
            self.before = float(loss_sum)
        self.loss_sum, state = loss_sum, streams.state()
        with self.noise or nullcontext():
            self.inner.micro_batch(batch, loss_sum)
        if any(not torch.equal(now, state[kind]) for kind, now in streams.state().items()):
            self.trace.random = ["the forward"]

    def update(self) -> bool:
        """Keep the gradients, unscaled, and the learning rates; then update."""
        self.loss, self.before = float(self.loss_sum) - (self.before or 0.0), None
        for name, group in self._groups():
            self._add("learning rate", name, of_numbers(float(group["lr"]), rounding=FLOAT32))
        if self.look.gradients:
            precision, one, scale = self.trainer.precision, torch.ones((), device=self.trainer.device), 1.0
            if precision.scales_loss:
                scale = float(precision.scaled(one, one.clone()))
            for name, p in reversed(self._parameters()):
                self._add_gradient("gradient", name, p, scale)
        self.made = bool(self.inner.update())
        return self.made

    def zero_grad(self) -> None:
        """Keep the state after the update: this is called after scheduler and average."""
        if self.made:
            self._after_update()
            self.number += 1
        else:
            self.trace.skipped += 1
            self.trace.entries = {key: entry for key, entry in self.trace.entries.items() if key[0] != self.number}
            self.rows = {key: rows for key, rows in self.rows.items() if key[0] != self.number}
        self.attempt += 1
        self.batches.clear()
        self.inner.zero_grad()

    def _add(self, phase: str, name: str, entry: TracedTensor, update: int | None = None) -> None:
        """Keep a tensor of this update, or of another one."""
        self.trace.entries[self.number if update is None else update, phase, name] = entry

    def _evaluation(self) -> None:
        """Keep each figure of the last evaluation.

        One that counts answers may change by one: rounding may move a sample over the threshold between two of them.
        """
        evaluator, world = self.trainer.evaluator, self.trainer.parallel.data_world
        counting = {*evaluator.loss.counting, *(name for meter in evaluator.meters if meter.counts for name in meter.directions)}
        seen = {
            of: sum(map(len, evaluator.batch.evaluation(data.source, world)[: evaluator.max_batches]))
            for of, data in evaluator.sets[evaluator.set].items()
        }
        for name, value in self.trainer.progress.final.items():
            entry = of_numbers(value, rounding=FLOAT32)
            if (figure := Figure.parse(name)).metric in counting:
                entry.rounding = max(entry.rounding, 1 / max(1, seen[figure.set]) / MARGIN)
            self._add("evaluation", name, entry)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """While it looks, nothing is rounded at random and no graph is kept."""
        if self.noise is not None:
            self.noise.paused = True
        with torch.no_grad(), torch.autocast(self.trainer.device.type, enabled=False):
            yield
        if self.noise is not None:
            self.noise.paused = False

    def _watch(self, stream: Stream) -> Stream:
        """Note each micro-batch's samples; permute and widen them if requested."""
        for batch, request in zip(stream, self.trainer.requests(), strict=False):  # micro-batches arrive in order
            indices = request.indices.cpu()
            if self.look.permute:
                generator = torch.Generator().manual_seed(self.look.permute)
                order = torch.randperm(len(indices), generator=generator)
                there = order.to(trees.first(batch.x).device)
                batch, indices = replace(batch, x=trees.select(batch.x, there), y=trees.select(batch.y, there)), indices[order]
            if self.look.float64:
                x, y = (trees.cast(tree, torch.float64) for tree in (batch.x, batch.y))
                batch = replace(batch, x=x, y=y, weight=batch.weight.double())
            self.batches.append((len(indices), indices if request.weight else indices[:0]))
            for phase, tree in (("inputs", batch.x), ("targets", batch.y)):
                for name, leaf in trees.named_leaves(tree):
                    self.add_rows(phase, name, len(self.batches) - 1, leaf)
            yield batch

    def add_rows(self, phase: str, name: str, micro: int, tensor: torch.Tensor) -> None:
        """Keep a tensor that has one row for each sample of a micro-batch, in the order of the samples' numbers."""
        count, kept = self.batches[micro]
        if tensor.ndim and len(tensor) == count and len(kept):
            values, rounding, shape = of_rows(tensor, phase == "targets")
            self.rows.setdefault((self.number, phase, name), []).append(TracedRows(kept.numpy(), values, rounding, shape))

    def _before_optimizer(self) -> None:
        """Keep the optimizer's gradients, unscaled and clipped.

        Skipped where ranks divide the weights and the optimizer has other tensors: copies of this rank's parts, or weights that
        this rank updates for all.
        """
        has_own, own = self.trainer.precision.owns_weights, dict(self._parameters())
        if self.trainer.parallel.whole_updates or (self._sharded() and has_own):
            return
        if has_own:
            own = {n: p for g in self.trainer.optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)}
        with self.looking():
            for name, p in reversed(own.items()):
                self._add_gradient("clipped gradient", name, p)

    def _add_gradient(self, phase: str, name: str, p: torch.Tensor, scale: float = 1.0) -> None:
        entry = of_tensor(whole(p if p.grad is None else p.grad), scale)
        self._add(phase, name, replace(entry, values=entry.values * 0.0, rounding=0.0) if p.grad is None else entry)

    def _after_update(self) -> None:
        trainer = self.trainer
        total = trainer.parallel.all_reduce_sum(torch.full_like(trainer.log.loss_sum, self.loss))
        self._add("loss", "", of_numbers(float(total) / trainer.parallel.data_world.size, rounding=FLOAT32))
        for name, buffer in trainer.model.named_buffers():
            if not buffer.is_meta:  # of another stage of a pipeline
                self._add("buffers", name, of_tensor(whole(buffer)))
        elsewhere = self._sharded() or trainer.parallel.whole_updates
        for member in [] if elsewhere else getattr(trainer.optimizer, "members", [trainer.optimizer]):
            for group in member.param_groups:
                for name, p in zip(group.get("param_names", []), group["params"], strict=False):
                    kept = {key: value for key, value in member.state.get(p, {}).items() if isinstance(value, torch.Tensor)}
                    for key, value in kept.items():
                        self._add("optimizer state", f"{key} of {name}", of_tensor(value))
        for phase, name, entry in self._changing():  # with the rounding of the tensor itself
            self._add(phase, name, replace(entry, values=entry.values - self.first[phase, name].values))
        if self.number == 1:
            unlike = ("params", "param_names", "lr", "initial_lr")
            self.trace.settings = {
                name: {k: v for k, v in group.items() if k not in unlike and isinstance(v, int | float | tuple)}
                for name, group in self._groups()
            }

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.trainer.model.named_parameters() if not p.is_meta]

    def _changing(self) -> Iterator[tuple[str, str, TracedTensor]]:
        """The weights, and if this process has all of them the averaged weights and buffers: phase, name, value."""
        for name, p in self._parameters():
            yield "weights", name, of_tensor(whole(p))
        averaged = {} if self._sharded() else self.trainer.ema.state_dict().get("tensors", {})
        for name, tensor in averaged.items():
            if not tensor.is_meta:
                yield "average", name, of_tensor(tensor)

    def _sharded(self) -> bool:
        return any(hasattr(p, "full_tensor") for p in self.trainer.model.parameters())

    def _groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each trained parameter's name with its group of the optimizer."""
        for group in self.trainer.optimizer.param_groups:
            for name in group.get("param_names", []):
                yield name, group

    def _merged(self, ranks: list[tuple[int, Trace, dict[Key, list[TracedRows]]]]) -> Trace | None:
        """Merge the ranks' traces on rank 0: its own state, the parts that only others have, and the samples of all."""
        if self.trainer.parallel.world.rank:
            return None
        trace: Trace = ranks[0][1]
        together: dict[Key, list[TracedRows]] = {}
        of_data = {rank: (other, rows) for rank, other, rows in reversed(ranks)}  # ranks that share samples have the same
        for _, rows in of_data.values():
            for key, parts in rows.items():
                together[key] = [*together.get(key, []), *parts]
        for _, other, _ in ranks:
            trace.entries |= {key: entry for key, entry in other.entries.items() if key not in trace.entries}
            trace.random = trace.random or other.random
        for key, entry in trace.entries.items():
            if key[1] == "samples":
                values = np.sum([other.entries[key].values for other, _ in of_data.values()], 0)
                trace.entries[key] = replace(entry, values=values)
        trace.entries |= {key: joined for key, found in together.items() if (joined := TracedRows.entry(found)) is not None}
        return trace
