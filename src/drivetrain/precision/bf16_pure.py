"""Weights, activations and gradients in bfloat16."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, ParamSpec, TypeVar

from drivetrain.core.lazy import torch
from drivetrain.core.machine import torch_patches
from drivetrain.core.options.option import BuildContext, RunSpec
from drivetrain.core.step.modules import replace_parameters
from drivetrain.core.step.trees import Tree, map_tensors
from drivetrain.core.typed import StateDict
from drivetrain.precision.base import OptimizerOption, Precision

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


class Bf16Pure(Precision):
    """Weights, activations and gradients in bfloat16. Its 8 bits would lose most updates; `master` sets how they are kept.

    fp32 keeps a float32 master copy of each weight, which the optimizer updates and the model's weight is rounded from.
    stochastic keeps none: each update converts the weights to float32 and rounds them back stochastically, with a
    probability in proportion to the distance, so that updates are kept on average (Gupta et al. 2015). The optimizer and
    its state are float32 either way. BatchNorm, for its running statistics, and the loss stay in float32.
    """

    effect = "close"
    changes = "rounds weights, activations and gradients to bfloat16"
    full_float32 = False
    owns_weights = True
    divides_weights = True

    def __init__(self, master: Literal["fp32", "stochastic"] = "fp32") -> None:
        self.master = master
        self.frees_weights = master == "stochastic"

    def roundoff(self) -> float:
        return 2.0**-8

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.batch.accumulation_steps > 1:
            yield (
                f"precision=bf16_pure adds up the gradients of {run.batch.accumulation_steps} micro-batches "
                "(batch.accumulation_steps) in bfloat16: precision=bf16 adds them up in float32"
            )

    def setup(self, context: BuildContext) -> None:
        super().setup(context)
        self._parallel = context.parallel
        self._generator = torch.Generator(self._device).manual_seed(torch.initial_seed())  # the same rounding on every rank

    def convert(self, model: torch.nn.Module, example: Tree) -> torch.nn.Module:
        norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase)]
        in_float32 = {id(p) for m in norms for p in m.parameters(recurse=False)}
        converted = {n: p for n, p in model.named_parameters() if p.is_floating_point() and id(p) not in in_float32}
        trained = {n: p for n, p in converted.items() if p.requires_grad}
        # Before the weights lose their lower bits. If ranks divide the weights, masters are made from the parts later.
        self._exact = (
            {} if self._parallel.whole_model or self.frees_weights else {n: p.detach().clone() for n, p in trained.items()}
        )
        if self._parallel.whole_model:
            self._keep_masters_of(trained)
        for module in model.modules():
            if module not in norms:
                module._apply(_to_bfloat16, recurse=False)
        model.register_forward_pre_hook(_arguments_in_bfloat16, with_kwargs=True)
        model.register_forward_hook(lambda _, args, output: map_tensors(_to_float32, output))
        masters = {"fp32": "float32 masters", "stochastic": "stochastic rounding"}[self.master]
        logger.info(f"{len(converted)} of {sum(1 for _ in model.parameters())} parameters in bfloat16, with {masters}")
        return model

    def _keep_masters_of(self, trained: dict[str, torch.nn.Parameter]) -> None:
        self._names, self._parameters = list(trained), list(trained.values())
        self._flat, self._masters = _flat_copies(self._parameters)
        self._draws = len(self._flat)

    def _keep_masters_of_parts(self, model: torch.nn.Module) -> None:
        """Keep masters of this rank's parts of the weights, present in the model while the optimizer is built."""
        parallel = self._parallel
        self._keep_masters_of({n: p for n, p in model.named_parameters() if p.dtype == torch.bfloat16 and p.requires_grad})
        for name, master, part in zip(self._names, self._masters, self._parameters, strict=True):
            parallel.stands_for(master, part)
            if name in self._exact:
                master.detach().copy_(parallel.own_part(name, self._exact.pop(name)))
        # All ranks draw equally many random numbers, so that their generators share one state, which is saved once.
        self._draws = int(parallel.all_reduce_max(torch.tensor(self._draws, device=self._device)))

    def build_optimizer(self, option: OptimizerOption, context: BuildContext) -> torch.optim.Optimizer:
        """Build an optimizer over the masters: they replace the model's parameters while the optimizer is built."""
        model = context.model
        if not self._parallel.whole_model:
            self._keep_masters_of_parts(model)
        replace_parameters(model, {id(p): master for p, master in zip(self._parameters, self._masters, strict=True)})
        try:
            optimizer = option.build(context)
        finally:
            replace_parameters(model, {id(master): p for p, master in zip(self._parameters, self._masters, strict=True)})
        torch_patches.wrap_state(optimizer, self._while_materialized)
        self._release()
        return optimizer

    def eval_weights(
        self, option: OptimizerOption, optimizer: torch.optim.Optimizer
    ) -> Callable[[], AbstractContextManager[None]]:
        @contextmanager
        def weights_to_evaluate() -> Iterator[None]:
            with self._materialized(), option.eval_weights(optimizer):
                torch._foreach_copy_(self._weights, self._views)
                yield

        return weights_to_evaluate

    def _while_materialized(self, method: Callable[P, T]) -> Callable[P, T]:
        from torch.utils._pytree import tree_map_only

        @functools.wraps(method)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            with self._materialized():
                return tree_map_only(torch.Tensor, self._detach_from_masters, method(*args, **kwargs))  # type: ignore[no-any-return]

        return wrapped

    @contextmanager
    def _materialized(self) -> Iterator[None]:
        """Materialize the masters outside of an update; afterwards the model's weights are set from them."""
        self._copy_weights_to_masters()
        try:
            yield
        finally:
            torch._foreach_copy_(self._weights, self._views)
            self._release()

    def _detach_from_masters(self, value: torch.Tensor) -> torch.Tensor:
        """Clone a tensor that shares the masters' memory, if that is freed between updates."""
        shared = self.frees_weights and value.untyped_storage().data_ptr() == self._flat.untyped_storage().data_ptr()
        return value.clone() if shared else value

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], bool | None]) -> bool:
        self._copy_weights_to_masters()
        with_gradient = [(m, p.grad) for m, p in zip(self._masters, self._parameters, strict=True) if p.grad is not None]
        gradients = [torch.empty_like(m) for m, _ in with_gradient]
        torch._foreach_copy_(gradients, [grad for _, grad in with_gradient])
        for (master, _), grad in zip(with_gradient, gradients, strict=True):
            master.grad = grad
        if made := clip() is not False:
            optimizer.step()
            self._round_masters_to_weights()
        for master in self._masters:
            master.grad = None
        return made

    def _copy_weights_to_masters(self) -> None:
        if self.master == "stochastic":
            self._flat.untyped_storage().resize_(self._flat.nbytes)
            torch._foreach_copy_(self._views, self._weights)

    def _round_masters_to_weights(self) -> None:
        if self.master == "stochastic":
            bits = self._flat.view(torch.int32)  # bfloat16 is float32's upper half: a random lower half carries into it
            noise = torch.randint(1 << 16, (self._draws,), dtype=torch.int32, generator=self._generator, device=bits.device)
            bits.add_(noise[: len(bits)]).bitwise_and_(-1 << 16)
        torch._foreach_copy_(self._weights, self._views)
        self._release()

    def _release(self) -> None:
        """Free the masters' memory between updates with stochastic rounding, so that activations can use it."""
        if self.master == "stochastic":
            self._flat.untyped_storage().resize_(0)

    @property
    def _views(self) -> list[torch.Tensor]:
        return [m.detach() for m in self._masters]

    @property
    def _weights(self) -> list[torch.Tensor]:
        return [p.detach() for p in self._parameters]  # made anew: compile=step records that they are the parameters' memory

    def state_dict(self) -> StateDict:
        if self.master == "stochastic":
            return {"random": self._generator.get_state()}
        # Copies, because `eval_weights` may change the masters while the state is written.
        return {"masters": {name: v.to("cpu", copy=True) for name, v in zip(self._names, self._views, strict=True)}}

    def load_state_dict(self, state: StateDict) -> None:
        if "random" in state and self.master == "stochastic":
            if len(state["random"]) == len(self._generator.get_state()):  # else it is another kind of device's
                self._generator.set_state(state["random"])
        elif self.master == "fp32":
            saved = state.get("masters") or dict(zip(self._names, self._weights, strict=True))
            for name, master in zip(self._names, self._views, strict=True):
                master.copy_(saved[name])
            torch._foreach_copy_(self._weights, self._views)


def _to_bfloat16(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16) if value.is_floating_point() else value


def _arguments_in_bfloat16(_: torch.nn.Module, args: Tree, kwargs: Tree) -> tuple[Tree, Tree]:
    return map_tensors(_to_bfloat16, args), map_tensors(_to_bfloat16, kwargs)


def _to_float32(output: torch.Tensor) -> torch.Tensor:
    return output.float() if output.is_floating_point() else output


def _flat_copies(parameters: list[torch.nn.Parameter]) -> tuple[torch.Tensor, list[torch.nn.Parameter]]:
    """Copy parameters to float32, with their strides, as views of one buffer, which is rounded and freed as a whole."""
    starts, size = [], 0
    for p in parameters:
        starts.append(size)
        size += -(-p.numel() // 16) * 16  # align tensors to 64 bytes, for vectorised kernels
    flat = torch.zeros(size, device=parameters[0].device if parameters else None)
    copies = [torch.nn.Parameter(flat.as_strided(p.shape, p.stride(), at)) for p, at in zip(parameters, starts, strict=True)]
    torch._foreach_copy_([c.detach() for c in copies], [p.detach() for p in parameters])
    return flat, copies
