"""The gradient of a rank's own samples, watched in the backward: the strategy averages it over the ranks at once."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Container
from typing import Any

from drivetrain.core.lazy import torch
from drivetrain.parallel.sharded_step import is_sharded, shard_of


class OwnGradients:
    """The sums of squares of gradients as a backward makes them, by the mesh dimensions over which their weights are divided."""

    def __init__(self) -> None:
        self._norms: dict[tuple[str, ...], list[torch.Tensor]] = defaultdict(list)
        self._hooks: dict[int, Any] = {}  # by the id of what is watched

    def watch(self, weight: Any, dimensions: tuple[str, ...] = ()) -> None:
        """Take the gradient of a weight, of which this rank has a part where there are dimensions."""

        def add(gradient: Any) -> None:
            if is_sharded(gradient) and gradient.placements != weight.placements:
                gradient = gradient.redistribute(placements=weight.placements)
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._norms[dimensions].append(torch.linalg.vector_norm(shard_of(gradient), dtype=wide).float())

        if id(weight) not in self._hooks:  # recomputation runs a forward, which gathers weights, twice
            self._hooks[id(weight)] = weight.register_hook(add)

    def squares(self) -> dict[tuple[str, ...], torch.Tensor]:
        """The sums so far, 0-d."""
        return {dimensions: torch.stack(norms).square().sum() for dimensions, norms in self._norms.items()}

    def leave(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks.values():
            hook.remove()


class GatheredGradients(OwnGradients):
    """Watches the weights that FSDP gathers for each block's forward; `dims_of` tells what each one stays divided over."""

    def __init__(self, root: torch.nn.Module, shards: Container[int], dims_of: Callable[[str], tuple[str, ...]]) -> None:
        from torch.distributed.fsdp import FSDPModule

        super().__init__()
        self._shards, self._dims_of = shards, dims_of  # the former by their ids
        for name, module in root.named_modules():
            if isinstance(module, FSDPModule):
                hook: Any = functools.partial(self._gathered, name)
                self._hooks[id(module)] = module.register_forward_pre_hook(hook)  # type: ignore[attr-defined]

    def _gathered(self, block: str, module: torch.nn.Module, inputs: Any) -> None:
        for name, p in module.named_parameters(prefix=block):
            if p.requires_grad and id(p) not in self._shards:
                self.watch(p, self._dims_of(name))
