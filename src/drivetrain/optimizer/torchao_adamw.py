"""torchao's AdamW with 8-bit state, with a float learning rate and a state_dict of plain tensors."""

from __future__ import annotations

import torch
import torchao.optim
from torch.optim.optimizer import ParamsT
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_8bit import OptimState8bit

from drivetrain.core.typed import StateDict

SCALE = "_scale"  # suffix of the name of a moment's scales


class AdamW8bit(torchao.optim.AdamW8bit):  # type: ignore[misc]  # a class without types
    """Both moments as 8-bit codes with one float32 scale for each block of 256 elements (Dettmers et al. 2022).

    Tensors of fewer than 4096 elements, or of a number not divisible by 256, keep moments in their own dtype. Updates compute in
    float32. torchao always compiles them, with the learning rate in a tensor; here `compiled` chooses, and the learning rate is a
    float.
    """

    def __init__(
        self, params: ParamsT, *, compiled: bool, lr: float, weight_decay: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)
        # Each shape has its own kernel, compiled once.
        self._adam = torch.compile(single_param_adam, fullgraph=True, dynamic=False) if compiled else single_param_adam

    def add_param_group(self, param_group: dict[str, object]) -> None:
        torch.optim.Optimizer.add_param_group(self, param_group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            lr = torch.tensor(group["lr"], dtype=torch.float32)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise TypeError("AdamW8bit takes no sparse gradients: set sparse=False in the Embedding")
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"], state["exp_avg_sq"] = (self._new_buffer(p, signed) for signed in (True, False))
                state["step"] += 1
                moments = state["step"], state["exp_avg"], state["exp_avg_sq"], None
                settings = *group["betas"], group["weight_decay"], group["eps"]
                self._adam(p.detach(), p.grad, *moments, lr, *settings, IS_ADAMW=True, BF16_STOCHASTIC_ROUND=False)

    def state_dict(self) -> StateDict:
        """The state in plain tensors: a moment's codes (uint8) under its name, its scales under another."""
        found = super().state_dict()
        return {**found, "state": {i: _unpacked(values) for i, values in found["state"].items()}}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a `state_dict()`."""
        super().load_state_dict({**state_dict, "state": {i: _packed(values) for i, values in state_dict["state"].items()}})


def _unpacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    plain = {name: value.codes if isinstance(value, OptimState8bit) else value for name, value in state.items()}
    return plain | {name + SCALE: value.scale for name, value in state.items() if isinstance(value, OptimState8bit)}


def _packed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `_unpacked`, in new tensors."""
    found = {name: value for name, value in state.items() if not name.endswith(SCALE)}
    for name, codes in found.items():
        if (scale := state.get(name + SCALE)) is not None:
            blank = OptimState8bit.zeros(codes.shape, name == "exp_avg", codes.numel() // scale.numel(), codes.device)
            blank.codes.copy_(codes)
            blank.scale.copy_(scale)
            found[name] = blank
    return found
