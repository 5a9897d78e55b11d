"""One process with several devices: the two techniques that came before a process for each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from drivetrain.core.blocks import sequential_blocks
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.parallel import balance
from drivetrain.parallel.base import Parallel
from drivetrain.parallel.environment import cuda_devices

logger = logging.getLogger(__name__)


class Dp(Parallel):
    """torch's DataParallel: one process, a thread per device. Here to compare with."""

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
        if cuda_devices() < 2:
            yield f"parallel=dp splits batches over CUDA devices, and here is {cuda_devices() or 'none'}: this is one process"
        else:
            yield (
                "parallel=dp copies the model to every device at each step, gathers outputs on the first and shares one "
                "Python between all: parallel=ddp does none of that"
            )

    def wrap_model(self, model: Any) -> Any:
        return torch.nn.DataParallel(model)


@dataclass(kw_only=True, eq=False)
class Split(Parallel):
    """Naive model parallelism: the blocks lie one after the other on `devices`, which work in turns. One process.

    null is all CUDA devices. Blocks go by measured cost: each device gets about the same time of a forward of two samples.
    """

    one_process = False

    devices: list[str] | None = None
    block: str | None = None

    machine_local_keys = ("devices",)

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.devices is not None and len(self.devices) < 2:
            yield f"parallel.devices={self.devices}: splitting takes two devices at least: name them, or set parallel=single"
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
                yield f"parallel.devices: {name!r} is no device: name them such as cuda:0 or cpu"
                continue
            if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
                yield f"parallel.devices: there is no {name}: torch finds {torch.cuda.device_count()} CUDA devices"
        if self.devices is None and (run.runtime.device_type() != "cuda" or torch.cuda.device_count() < 2):
            yield (
                f"parallel=split needs two devices, and torch finds {torch.cuda.device_count()} CUDA devices: "
                "name them in parallel.devices ([cpu,cpu] tries it out), or set parallel=single"
            )

    def shard(self, model: torch.nn.Module, dtype: str | None, example: torch.Tensor) -> None:
        names = self.devices or [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        devices = [torch.device(name) for name in names]
        row = sequential_blocks("parallel=split", model, self.block)
        if len(row) < len(devices):
            raise UserError(
                f"parallel=split: the model is a row of {len(row)} blocks, too few for {len(devices)} devices: name at most "
                f"{len(row)} in parallel.devices"
            )
        costs = balance.measured(model, row, example)
        places = balance.cuts(costs, len(devices))
        home = example.device
        for device, (first, last) in zip(devices, pairwise(places), strict=True):
            for block in row[first:last]:
                block.to(device)
                block.register_forward_pre_hook(_moves_to(device), with_kwargs=True)
        inside = {id(p) for block in row for p in block.parameters()}
        for module in _after(model, row[-1]):
            if not any(id(p) in inside for p in module.parameters()):
                module.to(devices[-1])
                module.register_forward_pre_hook(_moves_to(devices[-1]), with_kwargs=True)
        model.register_forward_hook(lambda _, args, output: output.to(home))  # where the targets are
        logger.info("%s on %s", balance.described(places, costs), ", ".join(names))


def _moves_to(device: torch.device) -> Any:
    """A hook before a forward that brings its tensors to `device`."""
    from torch.utils._pytree import tree_map

    def bring(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

    return lambda module, args, kwargs: (tree_map(bring, args), tree_map(bring, kwargs))


def _after(model: torch.nn.Module, block: torch.nn.Module) -> list[torch.nn.Module]:
    """The model's own children that are registered after the one that holds `block`."""
    children = list(model.children())
    holder = next(i for i, child in enumerate(children) if any(m is block for m in child.modules()))
    return children[holder + 1 :]
