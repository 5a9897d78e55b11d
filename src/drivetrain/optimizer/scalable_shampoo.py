"""pytorch_optimizer's ScalableShampoo with a state_dict of plain tensors."""

from __future__ import annotations

import pytorch_optimizer
import torch

from drivetrain.core.typed import StateDict


class ScalableShampoo(pytorch_optimizer.ScalableShampoo):
    """The library keeps objects as state, but checkpoints may not hold objects: this saves their tensors and rebuilds them."""

    def state_dict(self) -> StateDict:
        """The state in plain tensors."""
        found = super().state_dict()
        return {**found, "state": {i: _tensors(state) for i, state in found["state"].items()}}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a `state_dict()`. The tensors keep their dtypes, which may be wider than those of the parameters."""
        super().load_state_dict({**state_dict, "state": {}})
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, index in zip(group["params"], saved["params"], strict=True):
                if (values := state_dict["state"].get(index)) is not None:
                    for name, tensor in _tensors(self._blank_state(group, p)).items():
                        tensor.copy_(values[name])

    def _blank_state(self, group: dict[str, object], p: torch.Tensor) -> StateDict:
        """The library's state of a parameter at its first gradient."""
        gradient, p.grad = p.grad, torch.zeros_like(p)
        self.init_group({**group, "params": [p]})
        p.grad = gradient
        found: StateDict = self.state[p]
        return found


def _tensors(state: StateDict) -> dict[str, torch.Tensor]:
    """The tensors of a parameter's state by name: the optimizer's own, not copies."""
    graft, preconditioner = state["graft"], state["pre_conditioner"]
    found = {"momentum": state["momentum"], "graft_momentum": graft.momentum}
    if hasattr(graft, "statistics"):
        found["graft_statistics"] = graft.statistics
    for name in ("statistics", "pre_conditioners"):  # of all blocks and dimensions: one tensor if they have one size
        kept = getattr(preconditioner, name)
        found |= {name: kept} if isinstance(kept, torch.Tensor) else {f"{name}_{i}": t for i, t in enumerate(kept)}
    return found
