"""Runs a built trainer's own updates on fake tensors, and records them. The trainer's values do not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from drivetrain.core import trees
from drivetrain.core.microbatch import MicroBatch, Request
from drivetrain.engine.rehearsal.operation import Operation
from drivetrain.engine.rehearsal.recorder import Fakes, Recorder
from drivetrain.engine.trainer import Trainer

PARAMETERS, GRADIENTS, STATE, BATCH = "parameters", "gradients", "optimizer state", "batch"


@dataclass
class StepRecord:
    """The cost of an update: bytes by kind at the peak, and its operations with their numbers."""

    peak: Counter[str]
    most_during: dict[str, int]  # by an operation's signature: the bytes allocated when it has made its results
    operations: Counter[Operation]
    micro_batch: int  # samples
    micro_batches: int  # of an update


@dataclass
class Rehearsal:
    """A trainer whose step is made on fake tensors. Afterwards it cannot train: its optimizer's state has no values."""

    trainer: Trainer
    sample: MicroBatch  # real, for the shapes of micro-batches
    fakes: Fakes = field(init=False)  # of the model's weights, where these are fake already
    has_state: bool = False  # an update was made, so that the optimizer has its state

    def __post_init__(self) -> None:
        modes = (p.fake_mode for p in self.trainer.model.parameters() if isinstance(p, FakeTensor))
        self.fakes = next((mode for mode in modes if isinstance(mode, Fakes)), None) or Fakes()

    def record(self, size: int, micro_batches: int) -> StepRecord:
        """Record updates of micro-batches of `size`, the second of them with its operations: then there is optimizer state.

        The peak is that of both. Of an update's micro-batches two are made: the first sets gradients, any other adds to them.
        """
        self.trainer.model.train()
        with self.fakes, self.fakes.with_addresses():
            recorder = Recorder(self.fakes)
            self._note_resident(recorder)
            for times in [[0]] * (not self.has_state) + [[1, micro_batches - 1] if micro_batches > 1 else [1]]:
                with recorder:
                    self._update(recorder, size, times, 1 / micro_batches)
                self.has_state = True
        return StepRecord(recorder.at_peak(), recorder.most_during, recorder.operations, size, micro_batches)

    def _update(self, recorder: Recorder, size: int, times: list[int], weight: float) -> None:
        """Make an update; `times` says for each micro-batch how often its operations count."""
        trainer, loss_sum = self.trainer, torch.zeros((), device=self.trainer.device)
        recorder.phase = "forward"
        for number, recorder.times in enumerate(times, 1):
            batch = _enlarged(self.sample, size, weight, number == len(times))
            for leaf in (*trees.leaves(batch.x), *trees.leaves(batch.y)):
                recorder.note(leaf, BATCH)
            trainer.step.micro_batch(batch, loss_sum)
            del batch, leaf
        recorder.phase, recorder.times = "update", times[0]

        def note(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                recorder.note(parameter.grad, GRADIENTS)

        trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        for parameter in trained:
            note(parameter)
        within = [p.register_post_accumulate_grad_hook(note) for p in trained]  # a closure's, or phases'
        trainer.step.update()
        for handle in within:
            handle.remove()
        trainer.ema.update()
        self._note_resident(recorder)
        trainer.step.zero_grad()

    def _note_resident(self, recorder: Recorder) -> None:
        """Count what stays in memory between updates."""
        for kind, tensors in resident(self.trainer).items():
            for tensor in tensors:
                recorder.note(self.fakes.standing_for(tensor), kind)


def resident(trainer: Trainer) -> dict[str, list[torch.Tensor]]:
    """The tensors that stay in memory between updates, by kind. A tensor of several kinds is of the last one."""
    held = [vars(part) for part in (trainer.optimizer, trainer.precision, trainer.ema)]
    model = trainer.model
    return {STATE: list(_tensors(held, set())), PARAMETERS: [*model.parameters(), *model.buffers()]}


def _tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples, values of dicts and parts of an optimizer, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        if type(value).__module__.startswith("drivetrain.optimizer."):
            value = vars(value)
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            yield from _tensors(each, seen)


def _enlarged(sample: MicroBatch, size: int, weight: float, last: bool) -> MicroBatch:
    """A fake micro-batch of `size` samples shaped like the given ones."""

    def enlarge(tensor: torch.Tensor) -> torch.Tensor:
        dense = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
        memory_format = torch.channels_last if dense else torch.contiguous_format
        return torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device, memory_format=memory_format)

    x, y = trees.map_tensors(enlarge, sample.x), trees.map_tensors(enlarge, sample.y)
    return MicroBatch(x, y, torch.full_like(sample.weight, weight), last, last)


def one_sample(trainer: Trainer) -> MicroBatch:
    """A real micro-batch of two samples, the longest where they differ in length, for its shapes."""
    indices = trainer.batch.largest(len(trainer.train_data.source), 2)
    stream = trainer.read([Request(0, indices, 1.0)])
    batch: MicroBatch = next(iter(stream))
    return batch


# Of torch's list "CUDA Ops that can autocast to float32": those that the CPU's autocast computes in 16 bits.
IN_FLOAT32: frozenset[Callable[..., object]] = frozenset((
    functional.layer_norm, functional.group_norm, functional.softmax, functional.log_softmax, functional.cross_entropy,
    functional.nll_loss, functional.softplus, functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss,
    functional.kl_div, functional.cosine_similarity, functional.normalize, torch.softmax, torch.log_softmax, torch.exp, torch.log,
    torch.pow, torch.sum, torch.prod, torch.cumsum, torch.norm, torch.rsqrt, torch.Tensor.softmax, torch.Tensor.log_softmax,
    torch.Tensor.exp, torch.Tensor.log, torch.Tensor.pow, torch.Tensor.sum, torch.Tensor.prod, torch.Tensor.cumsum,
    torch.Tensor.norm, torch.Tensor.rsqrt,
))  # fmt: skip


class CudaAutocast(TorchFunctionMode):
    """Gives these operations their inputs in float32 while autocast is on."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, _widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
