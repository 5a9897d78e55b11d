"""Finds whether a run on a CPU diverged because a oneDNN kernel computed a wrong gradient, or by its loss."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

from drivetrain.core.errors import Diverged
from drivetrain.core.lazy import torch
from drivetrain.core.step import streams

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

APART = 0.5  # of a gradient's largest value: rounding stays below it in each dtype
NOISE = 1e-3  # of the largest value of all gradients: below it a gradient may be only rounding, as for a bias before a norm


def explained(error: Diverged, trainer: Trainer) -> str:
    """The message of a run that diverged: a wrong kernel is named instead of its advice."""
    on_cpu = trainer.device.type == "cpu" and trainer.parallel.world.size == 1 and torch.backends.mkldnn.enabled
    with suppress(Exception):  # the run has failed already, with its own message
        if on_cpu and (found := _wrong_gradient(trainer)):
            return (
                f"{error.what}: not the learning rate, but torch's kernel on this CPU is wrong: with oneDNN the gradient of "
                f"{found}, without it the same step is right. Give this layer another geometry, or set "
                "torch.backends.mkldnn.enabled = False in a module of your own"
            )
    return str(error)


def _wrong_gradient(trainer: Trainer) -> str:
    """The parameter whose gradient oneDNN computes wrong in one step from small random weights, in words; else ""."""
    model, draws, found = trainer.model.train(), torch.Generator().manual_seed(0), list[dict[str, torch.Tensor]]()
    kept = [(each.data, each.detach().clone()) for each in (*model.parameters(), *model.buffers())]
    try:
        for each in model.parameters():
            each.data.normal_(0, 0.02, generator=draws)
        for enabled in (True, False):
            torch._C._set_mkldnn_enabled(enabled)
            trainer.step.zero_grad()
            with streams.apart(), trainer.owned.untouched():
                trainer.forward_backward(trainer.batch.micro_batch(trainer.parallel.data_world))
            found.append({name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None})
    finally:
        torch._C._set_mkldnn_enabled(True)
        for data, before in kept:
            data.copy_(before)
    with_it, without = found
    noise = NOISE * max(float(each.abs().max()) for each in without.values())
    far = {name: float((with_it[name] - right).abs().max()) for name, right in without.items()}
    most = {name: APART * float(right.abs().max()) + noise for name, right in without.items()}
    wrong = next((name for name in far if math.isfinite(most[name]) and not far[name] <= most[name]), "")
    return wrong and f"{wrong} ({type(model.get_submodule(wrong.rpartition('.')[0])).__name__}) is {far[wrong]:.2g} off"
