"""The number formats of a step: autocast, loss scaling, and the order unscale → clip → step → update."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar, Literal, Protocol

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import import_torchao, torch
from drivetrain.core.machine import torch_patches
from drivetrain.core.options import groups
from drivetrain.core.options.option import BuildContext, Count, Effect, Option, Positive, RunSpec, needs_extra
from drivetrain.core.step.step import LateAnswer, Made
from drivetrain.core.step.trees import Tree
from drivetrain.core.typed import StateDict
from drivetrain.precision import cpu_half

logger = logging.getLogger(__name__)


def set_precision(matmul: str, tf32_convolutions: bool) -> None:
    """Set how torch may round the inputs of float32 products, until `isolated` is left."""
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = tf32_convolutions


def are_rounded(device: torch.device) -> bool:
    """Return whether matrix products on this device round their inputs: computed once, because CPUs and GPUs differ."""
    x = torch.full((256, 256), 1.0 + 2.0**-20, device=device)
    return not torch.equal(x @ torch.eye(256, device=device), x)


_NULL = nullcontext()


def backpropagate(loss: torch.Tensor, weight: torch.Tensor) -> None:
    """Run `loss.backward(weight)` by torch's engine directly. Both are 0-d. Raises UserError if the loss is not.

    Tensor.backward first checks the gradient's shape. That costs about 10 µs a step, and 0.3 s at the first step to import
    symbolic shapes.
    """
    if loss.ndim:
        raise UserError(
            f"the loss of a micro-batch has the shape {tuple(loss.shape)}: return its mean, a tensor without dimensions"
        )
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (weight,), False, False, (), allow_unreachable=True, accumulate_grad=True)


class OptimizerOption(Protocol):
    """The methods of the option of group `optimizer` that a precision calls."""

    def build(self, context: BuildContext) -> torch.optim.Optimizer:
        """Return the optimizer over the model's parameters."""

    def eval_weights(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Return a context in which the model holds the weights to evaluate and to save."""


class Precision(Option, groups.Precision):
    """precision=fp32: everything in float32. torch would round the inputs of convolutions to TensorFloat-32 on CUDA."""

    stage_option: ClassVar[bool] = True
    stage_keys: ClassVar[tuple[str, ...]] = ("*",)
    effect: ClassVar[Effect] = "exact"

    def setup(self, context: BuildContext) -> None:
        """Store the step's device. With only float32 tensors, every product is computed in float32 too."""
        self._device = context.device
        context.on_exit.enter_context(torch_patches.wide_convolutions(context.device))
        if self.full_float32:
            set_precision("highest", tf32_convolutions=False)

    def convert(self, model: torch.nn.Module, example: Tree) -> torch.nn.Module:
        """Convert the model to this precision, before it is compiled or wrapped. `example`: see the context."""
        return model

    def build_optimizer(self, option: OptimizerOption, context: BuildContext) -> torch.optim.Optimizer:
        """Build the optimizer over the updated parameters: the model's own, or master weights."""
        return option.build(context)

    def eval_weights(
        self, option: OptimizerOption, optimizer: torch.optim.Optimizer
    ) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that makes a context with the model's weights for evaluation and saving."""
        return lambda: option.eval_weights(optimizer)

    def notice(self) -> str:
        """Return the parts that it does not do on this device, or "". Call it after `convert`."""
        return ""

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for forward and loss."""
        return _NULL

    def backward(self, loss: torch.Tensor, weight: torch.Tensor) -> None:
        """Accumulate the gradients of `weight × loss`. The weight is the backward's initial gradient: no multiplication."""
        backpropagate(loss, weight)

    def scaled(self, loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the tensor on which the caller itself runs backward."""
        return loss * weight

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], bool | None]) -> Made:
        """Clip and update. Returns False for a skipped update; then schedule and EMA must not move."""
        if clip() is False:
            return False
        optimizer.step()
        return True

    def of_phase(self, name: str) -> Precision:
        """Return the precision for a phase of the updates. Its state is saved with this one's."""
        return self

    def autocast_dtype(self) -> str | None:
        """Return autocast's dtype of products, None without autocast. Call it after `convert`, which may switch it off."""
        return self.dtype

    def gathered_dtype(self) -> str | None:
        """Return the dtype for gathering sharded weights, None for their own. Call it after `convert`."""
        return self.dtype

    def state_dict(self) -> StateDict:
        """Return the state for a resumed run."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Load a `state_dict()`."""


class Tf32(Precision):
    """float32 with matrix products in TensorFloat-32: 10 bits of mantissa, on tensor cores from Ampere on.

    `matmul` sets torch.set_float32_matmul_precision; `cudnn` uses TF32 for convolutions too, which is torch's default.
    `matmul=highest` rounds convolutions alone, which is torch's default.
    """

    effect = "close"
    changes = "rounds the inputs of products to TensorFloat-32"

    def __init__(self, matmul: Literal["high", "medium", "highest"] = "high", cudnn: bool = True) -> None:
        self.matmul, self.cudnn = matmul, cudnn

    def roundoff(self) -> float:
        return 2.0**-11

    def setup(self, context: BuildContext) -> None:
        super().setup(context)
        set_precision(self.matmul, tf32_convolutions=self.cudnn)
        if notice := self.notice():
            logger.warning("precision=tf32 %s", notice)

    def notice(self) -> str:
        if self.matmul == "highest" or are_rounded(self._device):
            return ""
        return "rounds nothing on this device (CUDA devices have TF32 from Ampere on): this is float32"


class Bf16(Precision):
    """bfloat16 autocast: float32's range in 16 bits, so no loss scaling.

    On a CPU convolutions stay in float32, and so does everything if 16-bit products are slow there, by one measurement before
    training.
    """

    effect = "close"
    changes = "rounds products and activations to bfloat16"
    dtype = "bfloat16"
    full_float32 = False
    looks_for_slow_layers = True  # on a CPU, except in a forecast for another device
    _in_float32: str = ""  # which layers stay in float32 here
    _notice: str = ""  # the same in a sentence

    def roundoff(self) -> float:
        return 2.0**-8

    def setup(self, context: BuildContext) -> None:
        super().setup(context)
        self._parallel = context.parallel
        self._autocast = torch.autocast(self._device.type, self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype or "bfloat16")  # type: ignore[no-any-return]

    def convert(self, model: torch.nn.Module, example: Tree) -> torch.nn.Module:
        if self._device.type == "cpu" and self.looks_for_slow_layers:
            self._keep_in_float32(model, example)
        return model

    def _keep_in_float32(self, model: torch.nn.Module, example: Tree) -> None:
        """Measure the cost of 16 bits on this CPU. If it is too slow for one rank, it is so for all: they must compute alike."""
        ranks = self._parallel.gather_object(cpu_half.measure(model, example, self._dtype))
        slowest = self._parallel.broadcast_object(max(ranks, default=0.0))  # rank 0 alone has them
        if slowest > cpu_half.LIMIT:
            self._in_float32 = "everything"
            self._notice = f"everything stays in float32: on this CPU {self.dtype} takes {slowest:.0f} times as long"
            self._autocast = torch.autocast(self._device.type, enabled=False)
        elif any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in model.modules()):
            self._in_float32 = "convolutions"
            self._notice = "convolutions stay in float32, as on every CPU: torch's gradients in 16 bits are slow or wrong there"
        if self._notice:
            logger.info("%s", self._notice)

    def notice(self) -> str:
        return self._notice

    def autocast(self) -> AbstractContextManager[object]:
        return self._autocast

    def autocast_dtype(self) -> str | None:
        return self.dtype if self._autocast._enabled else None

    def gathered_dtype(self) -> str | None:
        return None if self._in_float32 else self.dtype  # a layer in float32 needs its weights in float32

    def state_dict(self) -> StateDict:
        return {"in_float32": self._in_float32}

    def load_state_dict(self, state: StateDict) -> None:
        before = state.get("in_float32", self._in_float32)
        if before != self._in_float32:
            logger.warning(
                "this machine computes %s in float32, and the one that wrote the checkpoint %s: the run goes on, "
                "and its results differ a little from those that it would have had there",
                self._in_float32 or "nothing", before or "nothing",
            )  # fmt: skip


class Amp(Bf16):
    """float16 autocast with dynamic loss scaling (Micikevicius et al. 2018): an overflow skips the update."""

    effect = "close"
    changes = "rounds products and activations to float16; an overflow skips the update"
    dtype = "float16"
    scales_loss = True
    _phases: dict[str, Amp]  # of the updates, by name
    step_waits = "an overflow skips the update: the host reads it, unless the optimizer is fused and looks itself"

    def __init__(self, init_scale: Positive = 65536.0, growth_interval: Count = 2000) -> None:
        self.init_scale, self.growth_interval = init_scale, growth_interval

    def roundoff(self) -> float:
        return 2.0**-11

    def setup(self, context: BuildContext) -> None:
        super().setup(context)
        self.scaler, self._phases = self._new_scaler(), {}

    def _new_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self._device.type, init_scale=self.init_scale, growth_interval=self.growth_interval)

    def of_phase(self, name: str) -> Amp:
        made = copy.copy(self)  # with its own scale, unaffected by the overflows of other phases
        made.scaler, made._phases, self._phases[name] = self._new_scaler(), {}, made
        return made

    def backward(self, loss: torch.Tensor, weight: torch.Tensor) -> None:
        backpropagate(self.scaler.scale(loss), weight)

    def scaled(self, loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(loss) * weight

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], bool | None]) -> Made:
        """Update unless there was an overflow.

        torch's fused kernels skip the update themselves, and the host asks for the result later. Otherwise the host reads the
        overflow first, which waits for the backward; clipping is queued by then.
        """
        if torch.compiler.is_compiling():
            return self._recorded_step(optimizer, clip)  # type: ignore[return-value]
        with self._unscaled(optimizer):
            wanted = clip() is not False
            found = [self._parallel.all_reduce_max(inf) for inf in self.scaler._found_inf_per_device(optimizer).values()]
            made: Made
            if wanted and len(found) == 1 and _skips_overflows(optimizer):
                with torch_patches.given_overflow(optimizer, found[0]):
                    optimizer.step()
                made = LateAnswer(found[0])
            elif made := wanted and not any(map(float, found)):
                optimizer.step()
            self.scaler.update()
        return made

    def _recorded_step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], bool | None]) -> torch.Tensor:
        """Make the update in any case, and return whether it counts, 0-d: compile=step then decides on the device."""
        with self._unscaled(optimizer):
            clip()
            overflow = sum(self.scaler._found_inf_per_device(optimizer).values()) > 0
            optimizer.step()
            self.scaler.update()
        return torch.logical_not(overflow)

    @contextmanager
    def _unscaled(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Unscale the gradients of one update. If it fails (out of memory), the next one has gradients to unscale again."""
        try:
            self.scaler.unscale_(optimizer)
            yield
        finally:
            self.scaler._per_optimizer_states.clear()

    def update_state(self) -> list[torch.Tensor]:
        scale, growth = self.scaler._scale, self.scaler._growth_tracker
        return [] if scale is None or growth is None else [scale, growth]

    def state_dict(self) -> StateDict:
        phases = {name: phase.scaler.state_dict() for name, phase in self._phases.items()}
        return {**super().state_dict(), **self.scaler.state_dict(), **({"phases": phases} if phases else {})}

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        if "scale" in state:  # it is not in a checkpoint of another precision: the scale then starts at init_scale
            self.scaler.load_state_dict({**state, "growth_interval": self.growth_interval})  # a setting of the config, not state
        for name, saved in state.get("phases", {}).items():
            self._phases[name].load_state_dict(saved)


def _skips_overflows(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its kernels skip an update after an overflow and all their outputs exist, because a skip creates none."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    stateful = [group["params"] for group in optimizer.param_groups if group.get("momentum") != 0]
    return not any(p.grad is not None and p not in optimizer.state for params in stateful for p in params)


ROCM = (9, 4)  # AMD's first architecture with float8 products, gfx942


class Fp8(Bf16):
    """float8 matrix products in large Linear layers (torchao's float8 training), bfloat16 elsewhere.

    Layers of fewer than `min_features` inputs or outputs stay in bfloat16, because the casts would cost more than the product
    gains; so do layers of sizes that 16 does not divide. `scaling` is torchao's recipe; `emulate` runs on any device, slowly.
    """

    effect = "close"
    changes = "rounds the inputs of large products to float8, and the rest to bfloat16"
    owns_weights = True
    replaces_linears = True

    def __init__(
        self,
        scaling: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise",
        min_features: Count = 128,
        emulate: bool = False,
    ) -> None:
        self.scaling, self.min_features, self.emulate = scaling, min_features, emulate

    def roundoff(self) -> float:
        return 2.0**-3  # e5m2, of gradients

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from needs_extra("torchao", "torchao", "precision=fp8")

    def advise(self, run: RunSpec) -> Iterator[str]:
        if self.emulate:
            yield "precision.emulate=true computes float8 products in float32: for trying out, slower than any other precision"
        elif not run.compile.active:
            yield "precision=fp8 casts with kernels of their own that cost what it gains: compile=inductor fuses them"

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        found = run.runtime.accelerator()
        needed = (8, 9) if self.scaling == "tensorwise" else (9, 0)
        needed = ROCM if found.rocm else needed
        if not self.emulate and (found.type != "cuda" or found.capability < needed):
            here = f"here it is {'.'.join(map(str, found.capability))}" if found.type == "cuda" else "here is none"
            yield (
                f"precision=fp8 needs a CUDA device of compute capability {needed[0]}.{needed[1]} or newer, and {here} "
                f"(precision.scaling={self.scaling}): set precision=bf16, or precision.emulate=true to try it out"
            )

    def convert(self, model: torch.nn.Module, example: Tree) -> torch.nn.Module:
        model = super().convert(model, example)
        import_torchao("torchao.float8")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        convertible = [m for m in linears if self._is_convertible(m)]
        if not convertible:
            sizes = ", ".join(sorted({f"{m.in_features}→{m.out_features}" for m in linears})) or "it has none"
            raise UserError(
                f"precision=fp8 finds no Linear layer to convert ({sizes}): it wants ≥ {self.min_features} inputs and outputs "
                "(precision.min_features) that 16 divides; set precision=bf16"
            )
        # The backward's inner dimension is the batch size, which may not be a multiple of 16: it is padded.
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(self.scaling), emulate=self.emulate, pad_inner_dim=True)
        logger.info(f"{len(convertible)} of {len(linears)} Linear layers compute in float8")
        model = convert_to_float8_training(model, config=config, module_filter_fn=lambda m, _: self._is_convertible(m))
        if self._device.type != "cuda":  # torchao respects only CUDA's autocast
            for layer in (m for m in model.modules() if isinstance(m, torch.nn.Linear) and self._is_convertible(m)):
                layer.register_forward_pre_hook(lambda _, args: (args[0].to(torch.bfloat16),))
        return model

    def _is_convertible(self, layer: torch.nn.Linear) -> bool:
        sizes = layer.in_features, layer.out_features
        return min(sizes) >= self.min_features and all(n % 16 == 0 for n in sizes)
