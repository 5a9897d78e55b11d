"""Everything in bfloat16, and where the updates add up."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.precision import one_pixel_conv
from drivetrain.precision.base import Precision

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext

logger = logging.getLogger(__name__)


class Bf16Pure(Precision):
    """Weights, activations and gradients in bfloat16, whose 8 bits lose most updates; `master` says where those add up.

    fp32 keeps a float32 copy of each weight: the optimizer updates it, the model's weight is rounded from it. stochastic
    keeps none: each update widens the weights and rounds them back up or down by chance, in proportion to the distance,
    so that updates add up in the mean (Gupta et al. 2015). The optimizer and its state are float32 either way, whatever
    the optimizer; BatchNorm stays in float32, for its running statistics; the loss is taken of float32 outputs.
    """

    full_float32 = False
    owns_weights = True

    def __init__(self, master: Literal["fp32", "stochastic"] = "fp32") -> None:
        self.master = master

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.batch.accumulation_steps > 1:
            yield (
                f"precision=bf16_pure adds up the gradients of {run.batch.accumulation_steps} micro-batches "
                "(batch.accumulation_steps) in bfloat16: precision=bf16 adds them up in float32"
            )

    def setup(self, context: BuildContext) -> None:
        super().setup(context)
        self._bits = torch.Generator(self._device).manual_seed(torch.initial_seed())  # every rank rounds alike

    def convert(self, model: torch.nn.Module, example: torch.Tensor) -> torch.nn.Module:
        if self._device.type == "cpu":
            for line in one_pixel_conv.without_strides(model, example):
                logger.info(line)
        norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase)]
        stay = {id(p) for m in norms for p in m.parameters(recurse=False)}
        mine = {n: p for n, p in model.named_parameters() if p.is_floating_point() and id(p) not in stay}
        named = {n: p for n, p in mine.items() if p.requires_grad}
        self._names, self._parameters = list(named), list(named.values())
        self._flat, self._masters = _flat_copies(self._parameters)  # before the weights lose their lower bits
        for module in model.modules():
            if module not in norms:
                module._apply(_to_bfloat16, recurse=False)
        self._weights = [p.detach() for p in self._parameters]
        model.register_forward_pre_hook(lambda _, args: tuple(_to_bfloat16(a) for a in args))
        model.register_forward_hook(lambda _, args, output: output.float())
        kept = {"fp32": "float32 masters", "stochastic": "stochastic rounding"}[self.master]
        logger.info(f"{len(mine)} of {sum(1 for _ in model.parameters())} parameters in bfloat16, with {kept}")
        return model

    def build_optimizer(self, option: Any, context: BuildContext) -> torch.optim.Optimizer:
        """An optimizer of the masters: they are in the model while it is built, and there while it saves and loads."""
        model = context.model
        self._exchange(model, dict(zip(self._parameters, self._masters, strict=True)))
        try:
            optimizer = option.build(context)
        finally:
            self._exchange(model, dict(zip(self._masters, self._parameters, strict=True)))
        for name in ("state_dict", "load_state_dict"):
            setattr(optimizer, name, self._with_masters(getattr(optimizer, name)))
        self._release()
        return optimizer

    def eval_weights(self, option: Any, optimizer: torch.optim.Optimizer) -> Callable[[], AbstractContextManager[None]]:
        @contextmanager
        def shown() -> Iterator[None]:
            with self._opened(), option.eval_weights(optimizer):
                torch._foreach_copy_(self._weights, self._views)
                yield

        return shown

    def _with_masters(self, method: Callable[..., Any]) -> Callable[..., Any]:
        from torch.utils._pytree import tree_map

        @functools.wraps(method)
        def opened(*args: Any, **kwargs: Any) -> Any:
            with self._opened():
                return tree_map(self._kept, method(*args, **kwargs))

        return opened

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Outside of an update: the masters are there, and what they are afterwards is what the model has."""
        self._widen()
        try:
            yield
        finally:
            torch._foreach_copy_(self._weights, self._views)
            self._release()

    def _kept(self, value: Any) -> Any:
        """A master that somebody keeps must not go when the masters' memory does."""
        if self.master == "fp32" or not isinstance(value, torch.Tensor):
            return value
        return value.clone() if value.untyped_storage().data_ptr() == self._flat.untyped_storage().data_ptr() else value

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], None]) -> bool:
        self._widen()
        graded = [(m, p.grad) for m, p in zip(self._masters, self._parameters, strict=True) if p.grad is not None]
        wide = [torch.empty_like(m) for m, _ in graded]
        torch._foreach_copy_(wide, [grad for _, grad in graded])
        for (master, _), grad in zip(graded, wide, strict=True):
            master.grad = grad
        clip()
        optimizer.step()
        self._narrow()
        for master in self._masters:
            master.grad = None
        return True

    def _widen(self) -> None:
        if self.master == "stochastic":
            self._flat.untyped_storage().resize_(self._flat.nbytes)
            torch._foreach_copy_(self._views, self._weights)

    def _narrow(self) -> None:
        if self.master == "stochastic":
            bits = self._flat.view(torch.int32)  # bfloat16 is float32's upper half: a random lower half carries into it
            noise = torch.randint(1 << 16, bits.shape, dtype=torch.int32, generator=self._bits, device=bits.device)
            bits.add_(noise).bitwise_and_(-1 << 16)
        torch._foreach_copy_(self._weights, self._views)
        self._release()

    def _release(self) -> None:
        """Between updates nothing needs the widened weights: the activations may have their memory."""
        if self.master == "stochastic":
            self._flat.untyped_storage().resize_(0)

    @property
    def _views(self) -> list[torch.Tensor]:
        return [m.detach() for m in self._masters]

    def _exchange(self, model: torch.nn.Module, by: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter in by:
                    module._parameters[name] = by[parameter]

    def state_dict(self) -> dict[str, Any]:
        if self.master == "stochastic":
            return {"random": self._bits.get_state()}
        # Copies: while the state is written, other weights may stand in the masters (`eval_weights`).
        return {"masters": {name: v.to("cpu", copy=True) for name, v in zip(self._names, self._views, strict=True)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "random" in state and self.master == "stochastic":
            self._bits.set_state(state["random"])
        elif self.master == "fp32":
            saved = state.get("masters") or dict(zip(self._names, self._weights, strict=True))
            for name, master in zip(self._names, self._views, strict=True):
                master.copy_(saved[name])
            torch._foreach_copy_(self._weights, self._views)


def _to_bfloat16(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _flat_copies(parameters: list[torch.nn.Parameter]) -> tuple[torch.Tensor, list[torch.nn.Parameter]]:
    """Parameters' copies in float32, with their strides, as views of one buffer: it is rounded and freed as a whole."""
    starts, size = [], 0
    for p in parameters:
        starts.append(size)
        size += -(-p.numel() // 16) * 16  # 64 bytes: where vectorised kernels want a tensor to begin
    flat = torch.zeros(size, device=parameters[0].device if parameters else None)
    copies = [torch.nn.Parameter(flat.as_strided(p.shape, p.stride(), at)) for p, at in zip(parameters, starts, strict=True)]
    torch._foreach_copy_([c.detach() for c in copies], [p.detach() for p in parameters])
    return flat, copies
