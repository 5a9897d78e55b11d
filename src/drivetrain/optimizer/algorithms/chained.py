"""Several optimizers chained to one."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.saving.sharded_checkpoint import join_optimizer_states


class ChainedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one. Each updates its own parameter groups; `param_groups` has the groups of all."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self.members = members
        super().__init__([group for member in members for group in member.param_groups], {})
        self.defaults = {key: value for member in members for key, value in member.defaults.items()}
        self._share_groups()

    def _share_groups(self) -> None:
        self.param_groups = [group for member in self.members for group in member.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each member."""
        for member in self.members:
            member.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of all, as that of one optimizer."""
        return join_optimizer_states([member.state_dict() for member in self.members])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict()`."""
        groups, first = list(state_dict["param_groups"]), 0
        for member in self.members:
            own, groups = groups[: len(member.param_groups)], groups[len(member.param_groups) :]
            count = sum(len(group["params"]) for group in own)
            state = {i - first: state for i, state in state_dict["state"].items() if first <= i < first + count}
            own = [{**group, "params": [i - first for i in group["params"]]} for group in own]
            member.load_state_dict({"state": state, "param_groups": own})
            first += count
        self._share_groups()
