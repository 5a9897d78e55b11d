"""Strategies with several devices in one process: DataParallel and naive model parallelism."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine import accelerators
from drivetrain.core.options.allowed import Name
from drivetrain.core.options.option import BuildContext, RunSpec
from drivetrain.core.step.blocks import sequential_blocks
from drivetrain.core.step.modules import run_once
from drivetrain.core.step.trees import Tree, map_tensors
from drivetrain.parallel.base import Parallel

logger = logging.getLogger(__name__)


FLOPS_PER_BYTE = 100  # FLOPs that a device computes while it moves one byte: H200 80, A100 200


def estimate_costs(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], example: Tree) -> list[float]:
    """Estimate the cost of each block's forward on `example`, in evaluation mode, so that the model does not change.

    An operation costs its bytes read and written, or its FLOPs if they take longer. Measured times would differ from run to run,
    and so would the cut and each rank's random numbers: a resumed run would not equal the interrupted one.
    Raises UserError if the model's forward does not call a block.
    """
    costs = dict.fromkeys(map(id, blocks), 0.0)
    started: dict[int, float] = {}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), _counted() as count:
        hooks = [b.register_forward_pre_hook(lambda module, *_: started.update({id(module): count()})) for b in blocks]
        hooks += [
            b.register_forward_hook(
                lambda module, *_: costs.update({id(module): costs[id(module)] + count() - started[id(module)]})
            )
            for b in blocks
        ]
        run_once(model, example, hooks)
    if uncalled := [i for i, block in enumerate(blocks) if id(block) not in started]:
        raise UserError(
            f"block {uncalled[0]} ({type(blocks[uncalled[0]]).__name__}) of the model's sequence of {len(blocks)} is not called "
            "in its forward, so it cannot be cut: name the class of its blocks in parallel.block, or set parallel=ddp or fsdp"
        )
    return [costs[id(block)] for block in blocks]


@contextmanager
def _counted() -> Iterator[Callable[[], float]]:
    """Count torch's operations within the context. The function returns their cost so far."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    total = 0.0

    class Counter(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """Return False: nothing is compiled here, and otherwise torch would import its compiler for this mode."""
            return False

        def __torch_dispatch__(self, func: Any, types: object, args: Tree = (), kwargs: dict[str, Tree] | None = None) -> Tree:
            nonlocal total
            kwargs = kwargs or {}
            out = func(*args, **kwargs)
            if not func.is_view:
                formula = flop_registry.get(func._overloadpacket)
                flops = formula(*args, **kwargs, out_val=out) if formula is not None else 0
                tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
                total += max(sum(t.numel() * t.element_size() for t in tensors), flops / FLOPS_PER_BYTE)
            return out

    with Counter():  # type: ignore[no-untyped-call]
        yield lambda: total


def balanced_boundaries(costs: Sequence[float], parts: int) -> list[int]:
    """Return the parts + 1 boundaries that split `costs` into `parts` non-empty ranges with the lowest possible maximum."""
    total = [0.0, *accumulate(costs)]
    best = {1: [(total[i], [0, i]) for i in range(len(costs) + 1)]}
    for n in range(2, parts + 1):
        best[n] = [
            min(
                ((max(best[n - 1][j][0], total[i] - total[j]), [*best[n - 1][j][1], i]) for j in range(n - 1, i)),
                default=(float("inf"), []),
            )
            for i in range(len(costs) + 1)
        ]
    return best[parts][len(costs)][1]


def describe_split(boundaries: Sequence[int], costs: Sequence[float]) -> str:
    """Describe the ranges and their shares of the cost, as in "4 + 5 blocks (48 % + 52 % of their forward)"."""
    total = sum(costs) or 1.0
    ranges = list(pairwise(boundaries))
    shares = " + ".join(f"{sum(costs[a:b]) / total:.0%}".replace("%", " %") for a, b in ranges)
    return f"{' + '.join(str(b - a) for a, b in ranges)} blocks ({shares} of their forward)"


class Dp(Parallel):
    """torch's DataParallel: one process, a thread per device. Included for comparison."""

    effect = "close"
    changes = "a batch is split among devices, and BatchNorm takes its statistics from each part"
    one_process = False
    thread_per_device = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if run.compile.active:
            yield (
                f"{run.named('compile')} and parallel=dp exclude each other (it copies the model to every device at each step, "
                "and a compiled one knows one device): set parallel=ddp"
            )
        if run.checkpointing.active:
            yield (
                f"{run.named('checkpointing')} and parallel=dp exclude each other (the copies would recompute with the first "
                "device's weights): set parallel=ddp"
            )

    def advise(self, run: RunSpec) -> Iterator[str]:
        if (count := accelerators.device_count()) < 2:
            yield f"parallel=dp splits batches over devices, but torch finds {count or 'none'} here: nothing is split"
        else:
            yield (
                "parallel=dp copies the model to every device at each step, gathers outputs on the first and shares one "
                "Python between all: parallel=ddp does none of that"
            )

    def wrap_model(self, model: torch.nn.Module, context: BuildContext) -> torch.nn.Module:
        return torch.nn.DataParallel(model)


@dataclass(kw_only=True, eq=False)
class Split(Parallel):
    """Naive model parallelism in one process: consecutive blocks are on consecutive `devices`, and the devices take turns.

    null means all devices. Blocks are split by estimated cost, so that each device gets about the same forward time.
    """

    effect = "exact"
    one_process = whole_model = False

    devices: list[str] | None = None
    block: Name | None = None

    machine_local_keys = ("devices",)

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.devices is not None and len(self.devices) < 2:
            yield f"parallel.devices={self.devices}: splitting takes at least two devices: name them, or set parallel=single"
        if not run.compile.crosses_devices:
            yield (
                f"{run.named('compile')} and parallel=split exclude each other (activations move between devices within the "
                "forward): set compile=inductor or none"
            )

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        for name in self.devices or []:
            try:
                device = torch.device(name)
            except RuntimeError:
                yield f"parallel.devices: {name!r} is no device: give names such as cuda:0 or cpu"
                continue
            found = accelerators.find()
            count = found.count if device.type == found.type else 0
            if device.type != "cpu" and (device.index or 0) >= count:
                yield f"parallel.devices: there is no {name}: torch finds {count} {device.type.upper()} devices"
        if self.devices is None and (count := run.runtime.accelerator().count) < 2:
            yield (
                f"parallel=split needs two devices, and torch finds {count or 'none'} for runtime.device={run.runtime.device}: "
                "name them in parallel.devices ([cpu,cpu] tries it out), or set parallel=single"
            )

    def norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)  # on several devices

    def shard(self, model: torch.nn.Module, dtype: str | None, example: Tree) -> None:
        first_device = next(model.parameters()).device
        names = self.devices or [f"{first_device.type}:{i}" for i in range(torch.accelerator.device_count())]
        devices = [torch.device(name) for name in names]
        blocks = sequential_blocks("parallel=split", model, self.block)
        if len(blocks) < len(devices):
            raise UserError(
                f"parallel=split: the model is a sequence of {len(blocks)} blocks, too few for {len(devices)} devices: name at "
                f"most {len(blocks)} in parallel.devices"
            )
        costs = estimate_costs(model, blocks, example)
        boundaries = balanced_boundaries(costs, len(devices))
        for device, (first, last) in zip(devices, pairwise(boundaries), strict=True):
            for block in blocks[first:last]:
                block.to(device)
                block.register_forward_pre_hook(_move_inputs_hook(device), with_kwargs=True)
        in_blocks = {id(p) for block in blocks for p in block.parameters()}
        children = list(model.children())
        holder = next(i for i, child in enumerate(children) if any(m is blocks[-1] for m in child.modules()))
        for module in children[holder + 1 :]:
            if not any(id(p) in in_blocks for p in module.parameters()):
                module.to(devices[-1])
                module.register_forward_pre_hook(_move_inputs_hook(devices[-1]), with_kwargs=True)
        back = partial(map_tensors, lambda tensor: tensor.to(first_device))  # the targets are there
        model.register_forward_hook(lambda _, args, output: back(output))
        logger.info("%s on %s", describe_split(boundaries, costs), ", ".join(names))


def _move_inputs_hook(device: torch.device) -> Callable[[torch.nn.Module, Tree, Tree], tuple[Tree, Tree]]:
    """Return a forward pre-hook that moves the inputs to `device`. For a CPU it waits, else the CPU would read them too early."""
    move = partial(map_tensors, lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))
    return lambda module, args, kwargs: (move(args), move(kwargs))
