# long: the groups' facts about each other are read side by side
"""The facts about an option of each config group that the other groups may read: groups do not import each other.

The base class of a group derives from its class here, so that each fact is declared once. The base class implements the abstract
methods.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

from drivetrain.core.lazy import torch
from drivetrain.core.machine import accelerators
from drivetrain.core.machine.accelerators import Accelerator
from drivetrain.core.order import Order, Sampling
from drivetrain.core.step.microbatch import MicroBatch, Request
from drivetrain.core.step.source import Source
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.core.step.trees import Forward, Tree
from drivetrain.core.typed import JsonMapping, StateDict
from drivetrain.core.world import World

T = TypeVar("T")
Sums = Callable[[Sequence["torch.Tensor"]], list["torch.Tensor"]]  # adds up numbers of parameters over ranks
Better = Callable[[float, float], float]  # min or max: returns the better of two values


class Adapter:
    """Trains corrections of weights instead of the weights."""

    active = False
    true_gradient = True  # whether its backward is the derivative of its forward
    lr_ratio: float = 1.0  # factor of the learning rate for parameters that begin at 0 (FACTOR of core/step/low_rank.py)

    def frozen(self, model: torch.nn.Module) -> list[str]:
        """Return the names of the model's parameters that do not train because of the adapters."""
        return []


class Augment:
    """Changes samples at random."""

    mixes = False  # mixes each sample with the next one in the epoch's order


class Batch:
    """Splits the samples into updates and micro-batches."""

    accumulation_steps = 1  # micro-batches of one update, before any growth
    pad_to = 1  # lengths of training sequences are padded to multiples of this
    buckets_lengths: ClassVar[bool] = False  # sequences are grouped into micro-batches of a few lengths
    fixed_micro_batches: ClassVar[bool] = True  # all updates have the same number and size of micro-batches
    global_batch: int
    tokens: int | None
    preallocate: bool
    untried: str
    needs_trial: ClassVar[bool]
    memory_gb: float | None = None  # limit of the memory for choosing a size
    found: JsonMapping | None  # the measurement behind the size, if there was one
    order: Order  # of the training samples
    lengths: torch.Tensor | None  # (n,) the tokens of each training sample, for sequences
    weighs_by_length: bool  # micro-batches are weighted by their tokens; else by their samples

    @property
    @abstractmethod
    def differs_by_stage(self) -> bool:
        """True if the stages of the run have updates of different sizes, so that each has whole epochs."""

    @abstractmethod
    def of_stages(self, stages: Sequence[tuple[int, Self]]) -> Self:
        """Return this option with the sizes of each stage's batch, from the epoch of its start on."""

    @abstractmethod
    def sizes(self) -> tuple[object, ...]:
        """Return the settings that decide the samples of each update."""

    @abstractmethod
    def stretches(self, epochs: int) -> list[range]:
        """Return the epochs of a run, grouped by the size of their updates."""

    @abstractmethod
    def total_updates(self, samples: int, epochs: int, drop_last: bool) -> int:
        """Return the number of updates in a run of `epochs`; 0 if an epoch has none, or lengths are to be read first."""

    @abstractmethod
    def lr_factor(self) -> float:
        """Return the factor by which the batch size scales the learning rate."""

    @abstractmethod
    def decay_factor(self) -> float:
        """Return the factor by which the batch size scales the weight decay."""

    @abstractmethod
    def micro_batch(self, world: World) -> int:
        """Return the maximum number of samples in one rank's forward."""

    @abstractmethod
    def size(self, epoch: int) -> int:
        """Return the samples of one update in an epoch."""

    @abstractmethod
    def updates(self, samples: int, epoch: int, drop_last: bool) -> int:
        """Return the number of updates in an epoch over `samples`."""

    @abstractmethod
    def requests(self, seed: int, epoch: int, world: World, drop_last: bool, skip: int = 0) -> Iterator[Request]:
        """Yield the micro-batches of one rank in an epoch, in order, from update number `skip` on."""


class Checkpointing:
    """Recomputes activations in the backward."""

    active = False
    chosen_by_compiler = False
    keeps_on_host = False  # the tensors for the backward
    asks_for_each_operation = False  # in Python, to decide whether to keep its result
    memory_gb: float | None = None  # limit for a forecast that chooses the recomputed blocks before the run starts
    budget = 1.0  # share of the activations that the compiler keeps
    found: JsonMapping | None  # the forecast and the choice


class Clip:
    """Bounds gradients."""

    active = False


class Compile:
    """Compiles the model, or the whole step."""

    active = False
    captures_step = False  # the whole step is one graph
    cuda_graphs = False
    torchscript = False
    partitions_activations = False  # chooses which activations to keep between forward and backward
    specializes_on_shapes = False  # recompiles, or makes slower code, if shapes change
    ranks_meet_in_forward = False  # the compiled forward may contain collectives
    crosses_devices = True  # activations may move between devices within the forward
    whole_forward = False  # the model's forward is compiled as a whole, not block by block
    dynamic: bool | None = False  # compile for any shape; None: once shapes change


class Data:
    """The samples."""

    drop_last: bool
    order: Sampling
    targets: TargetKind | None  # a sample's kind of target; None: only the user knows
    # Inputs are sequences of tokens, which may differ in length; None where only the user knows.
    tokens: bool | None
    max_value: ClassVar[float | None] = 255.0  # the largest value of an input; None where there is no bound
    on_device = False  # samples are made on the model's device
    mirrored_changes_label = False  # a mirrored image shows another class
    each_token_counts = True  # each token of a sample is a target of the loss, where targets are tokens
    packing = False  # samples share rows, with position ids that begin anew at each of them
    has_prompts = False  # samples are prompts with answers, whose tokens alone are targets
    byte_tokens = True  # a token is a byte: losses are also in bits per byte
    may_differ_in_length = False  # samples may be sequences of several lengths, other than tokens
    reads_up_to: int | None = None  # tokens of each sample, in a stage that shortens them
    views = 1  # the augmented views of each sample
    reads_rows = False  # `read_inputs` reads any file, and lines: they are tables
    text_remedy = ""  # the settings that make its samples sequences of tokens, for messages

    @abstractmethod
    def with_values(self, **values: object) -> Self:
        """Return a copy with other values of settings, or of attributes that follow from them."""

    @abstractmethod
    def judging_sets(self) -> Sequence[str]:
        """Return the names of the sets that select models; a single one is \"\"."""

    @abstractmethod
    def order_of(self, source: Source, run: Any) -> Order:
        """Return the order of the training samples in a run. Raises UserError."""

    @abstractmethod
    def train_samples(self) -> int | None:
        """Return the number of training samples; None where it is not known before loading."""

    def shape(self) -> tuple[int, ...] | None:
        """Return the shape of one input; None where it is not known before loading."""
        return None

    def decodes_images(self) -> bool:
        """True if samples are image files, decoded as they are read."""
        return False


class Debug:
    """Looks for faults in a run."""

    updates: int | None = None  # stop after this many updates
    eval_batches: int | None = None  # evaluate at most this many batches
    augments = True  # whether samples are augmented
    names_backward_lines = False  # names the forward line of an operation in the backward


class Ema:
    """Keeps an average of the weights."""

    active = False


class Loader:
    """Loads requested samples to the device."""

    num_workers = 0  # processes that read in each rank
    holds_samples = False  # on the device, all of them


class Logger:
    """Writes records."""


class Loss:
    """The loss to train with."""

    metrics: tuple[str, ...] = ("loss",)  # names of the metrics that an evaluation reports
    best: tuple[str, Better] = ("loss", min)  # the metric that ranks models; picks the better value
    takes: tuple[TargetKind, ...] = ()  # the kinds of targets that it can be computed from
    soft_targets = False  # whether it takes probabilities of classes as targets, as mixup makes them
    compares_samples = False  # it compares samples with each other: it is computed from the whole batch of all ranks
    evaluated_together = 1  # samples that an evaluation keeps in one batch, in their order
    runs_model = False  # it calls the model itself, as often as it likes
    takes_trees = False  # outputs and targets may be trees of tensors
    takes_whole = False  # it gets the model's whole return value, even if a part is named for metrics and predictions
    masks_tokens = False  # some tokens are hidden from the model, which predicts them

    def outputs(self, classes: int) -> int:
        """Return the number of outputs that the model needs for data with `classes` classes, labels or values."""
        return classes

    def joined(self, x: Tree) -> Tree:
        """Return a batch's inputs as the model takes them: several views of a sample become as many inputs."""
        return x

    def parts(self) -> dict[str, torch.Tensor]:
        """Return running sums of its named parts since the last log record, 0-d each; logging sets them to 0."""
        return {}

    def keeps(self) -> dict[str, object]:
        """Return the user's objects by name, once they are set up: their state is saved."""
        return {}

    def output_problem(self, output: tuple[int, ...], classes: int) -> str | None:
        """The fault of the output's shape for two samples, such as "5 outputs for the 10 classes"; None: no fault."""
        return None

    @abstractmethod
    def step(self, forward: Forward, batch: MicroBatch) -> torch.Tensor:
        """Run the forward on a micro-batch's inputs, and return the mean loss, 0-d, to be differentiated."""


class Metric:
    """Measures outputs in an evaluation."""

    @property
    @abstractmethod
    def directions(self) -> dict[str, Better | None]:
        """The figures that it gives by name, and which of two values is better."""


class Model:
    """The network."""

    freeze: Sequence[str]
    unfreeze: Mapping[str, object]
    tokens: ClassVar[bool | None] = False  # whether it reads sequences of tokens; None: not known
    generates: ClassVar[bool | None] = False  # whether it has a method `generate`, which writes answers; None: not known
    may_be_transformer: ClassVar[bool] = False
    may_convolve: ClassVar[bool] = True  # whether it may have convolutions, whose memory layout matters
    packs: ClassVar[bool] = False  # whether it separates texts in one row, by position ids that begin anew
    packs_in_one_row = False  # whether it does so only in a batch of one row

    @property
    def has_tokenizer(self) -> bool:
        """True if the model has its own tokenizer, which the data then uses."""
        return False

    @property
    @abstractmethod
    def given_weights(self) -> bool:
        """True if training starts from given weights, not from random ones."""


class Optimizer:
    """Computes updates from gradients."""

    lr: float
    weight_decay: float
    final_weight_decay: float | None
    states: ClassVar[int] = 0  # least number of state tensors for each parameter, of its size
    elementwise: ClassVar[bool] = False  # whether an element's update needs only that element's gradient, so that shards suffice
    decays_by_lr: ClassVar[bool] = False  # whether an update decays each weight by lr × weight_decay, up to a constant factor
    by_norms: ClassVar[bool] = False  # whether its only further need is norms of whole parameters (LayerwiseOptimizer)
    by_parameter: ClassVar[bool] = False  # whether a parameter's update needs that parameter's whole gradient, and no other
    for_whole_weights: ClassVar[bool] = False  # whether its updates are made for whole weights, not for thin factors of them
    takes_closure: ClassVar[bool] = False  # whether it runs an update's micro-batches itself, several times


class Parallel:
    """Trains on several ranks or devices; here, as one process."""

    world = World()  # this process among all ranks
    data_world = World()  # this process among the data-parallel ranks; ranks that split the model get the same samples
    data_group: Any = None  # the process group of the data-parallel ranks; None: the group of all ranks
    nnodes = 1  # machines
    lockstep_evaluation = False  # a forward needs all ranks, also in evaluation
    distributed = False  # needs a process group, also with one rank
    one_process = True  # on one device
    reduces_in_graph = True  # a step recorded as one graph can hold all communication of its ranks
    shard_optimizer = False  # ranks hold all weights whole, and each weight is updated by one rank
    whole_model = True  # a device keeps all parameters, with their gradients and optimizer state
    thread_per_device = False
    calls_parts = True  # parts of the model may be called outside of its forward
    own_forward = True  # each rank runs the forward of the whole model
    can_unfreeze = True  # parameters may begin to train after the first update

    def ranks(self) -> int:
        """Return the number of processes that train together."""
        return 1

    def local_ranks(self) -> int:
        """Return the number of ranks on this machine."""
        return 1

    def data_ranks(self) -> int:
        """Return the number of data-parallel ranks, which split the samples of an update."""
        return self.ranks()

    @abstractmethod
    def divided(self, kind: str, name: str, tensor: torch.Tensor) -> Any:
        """Return this rank's parts of a tensor that belongs to the weight `name` (saving/content.py)."""

    def evaluation_context(self) -> AbstractContextManager[object]:
        """Return the context for evaluation: no gradients."""
        return torch.no_grad()

    def all_reduce_sum(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sum over the data-parallel ranks."""
        return sums

    def inference_model(self, model: torch.nn.Module) -> Forward:
        """Return the callable that evaluation calls; every rank gets its outputs."""
        return model

    def whole_parameters(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """A context within `plain_parameters` in which parameters are whole, for an optimizer that needs it."""
        return nullcontext()

    def own_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor that belongs to a weight."""
        return tensor

    def stands_for(self, copy: torch.Tensor, parameter: torch.Tensor) -> None:
        """Note that the optimizer has a copy instead of a parameter."""

    def norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the norm of the whole model's gradients, 0-d; `parameters` are the optimizer's, or the model's."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return torch.zeros(())
        # torch's get_total_norm first groups them by device and type, which takes as long as the norm of a small model.
        norms = torch.stack(torch._foreach_norm(gradients, norm_type))
        return torch.linalg.vector_norm(norms, norm_type)  # type: ignore[no-any-return]

    def layer_sums(self, parameters: Sequence[torch.Tensor]) -> Sums | None:
        """Return a function that adds up numbers of these parameters over the ranks that hold their parts.

        It takes and returns a list with a tensor for each parameter. None: no other rank holds a part of one.
        """
        return None

    def row_sums(self, parameters: Sequence[torch.Tensor]) -> Sums | None:
        """Return `layer_sums` for numbers of each row (a vector is one row)."""
        return None

    def all_reduce_max(self, found: torch.Tensor) -> torch.Tensor:
        """Return the maximum over all ranks that hold parts of one gradient, 0-d: an overflow in one part counts for all."""
        return found

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Broadcast rank 0's buffers, so that all ranks evaluate the saved model."""

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all ranks rank 0's values of these tensors, in place."""

    def gather_object(self, value: T) -> list[T]:
        """Return a list of every rank's value, on rank 0. Its tensors are sent one by one, and arrive on the CPU."""
        return [value]

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value, on every rank. Its tensors are sent one by one, and arrive on the CPU."""
        return value

    def energy(self, device: torch.device, before: tuple[str, float] | None) -> float | None:
        """Return the joules that all ranks' devices have used since their readings `before`, on rank 0."""
        if device.type != "cuda" or not (self.one_process or self.distributed):  # else it uses several devices
            return None
        readings = self.gather_object((before, accelerators.used(device)))
        return None if self.world.rank else accelerators.total([first for first, _ in readings], [last for _, last in readings])

    def full_state_dict(self, model: torch.nn.Module, state: StateDict) -> tuple[StateDict, StateDict]:
        """Return the full, unsharded weights and training state, on rank 0."""
        return model.state_dict(), state

    def with_states_of_all(self, state: StateDict) -> StateDict:
        """Return, on rank 0, the state with the optimizer state of all ranks, where each has the state of other weights."""
        return state

    def empty_shard(self, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor for reading this rank's parts of a tensor of this shape; a meta tensor if it has none."""
        return torch.empty(shape, dtype=dtype)

    def saving_group(self) -> torch.distributed.ProcessGroup | None:
        """Return a process group of all ranks for the threads that save."""
        return None


class Precision:
    """The number formats of a step."""

    dtype: str | None = None  # of autocast
    full_float32 = True  # every tensor is float32
    scales_loss = False  # an overflow skips the update
    owns_weights = False  # keeps its own copies of the weights
    divides_weights = False  # can keep copies of a rank's parts of the weights
    replaces_linears = False  # replaces Linear layers by its own
    matmul: str = ""  # the value for torch.set_float32_matmul_precision; "": it is not set
    cudnn = False  # convolutions round their inputs to TensorFloat-32
    frees_weights = False  # frees these copies between updates

    @abstractmethod
    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for forward and loss."""

    @abstractmethod
    def scaled(self, loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the tensor to call backward on, where the caller does so itself."""

    def update_state(self) -> list[torch.Tensor]:
        """Return the tensors that an update changes in addition to the model's and the optimizer's."""
        return []


class Runtime:
    """The device, the seed, the CPU threads and the backend flags of a run."""

    device: str
    seed: int
    cudnn_benchmark: bool
    found: JsonMapping | None  # the trials behind the number of threads, if there were any
    zero_grad: Literal["none", "memset"]

    @abstractmethod
    def device_type(self) -> str:
        """Return the device type as torch names it, with `auto` resolved. It starts no device, so that ranks can be forked."""

    @abstractmethod
    def accelerator(self) -> Accelerator:
        """Return the facts about the devices of the run's type."""


class Saving:
    """Decides when checkpoints are written."""

    active = False
    every_updates: int | None = None  # between two checkpoints, if the user sets it
    best = False  # keeps the checkpoints of the best evaluations
    sharded = False


class Scheduler:
    """Sets the learning rate."""

    follows_evaluations = False  # it does not need the run's length: the evaluations' metrics set its pace

    @property
    @abstractmethod
    def constant(self) -> bool:
        """True if the learning rate stays after its warm-up."""


@dataclass(kw_only=True)
class Splits:
    """The loaded data: its samples, and the facts that a model needs."""

    train: Source
    shape: Any  # of one input, tuple[int, ...]; where inputs are a tree, the same tree of their shapes
    classes: int  # of the model's outputs: classes, labels or values
    names: Sequence[str] | None = None  # of the classes, where they have names
    vocabulary: int | None = None  # of the inputs, where they are tokens; None: that of the outputs
    mask_token: int | None = None  # that hides a token from the model, if the model's tokenizer has one
    pad_token: int | None = None  # that pads texts with the tokens of the model's own tokenizer
    token_bytes: torch.Tensor | None = None  # (vocabulary,) the bytes of text of each target token; None: a token is a byte

    @abstractmethod
    def two_samples(self, device: torch.device) -> Tree:
        """Return the inputs of two samples as zeros, to try a model with."""


class Stop:
    """Ends a run before its last epoch."""


class Surgery:
    """One edit of the model."""

    memory_format: str | None = None  # name of the torch.memory_format for the edited model's inputs
    ranks_meet_in_forward = False  # the edited forward waits for the other ranks


class Task:
    """The problem to learn."""

    targets: ClassVar[tuple[TargetKind, ...]] = ()  # the allowed kinds of targets; (): any
    writes_answers: ClassVar[bool] = False  # whether a finished run writes answers to prompts
