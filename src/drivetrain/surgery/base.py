"""Edits of the model before training. Each returns one line that says what it changed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Option, RunSpec
from drivetrain.surgery.tracing import before_norm


class Edit(Option):
    """One model edit; surgery=[] is the off switch."""

    memory_format: str | None = None  # of the inputs that the edited model wants
    ranks_meet_in_forward = False  # the edited forward waits for the other ranks

    def apply(self, model: torch.nn.Module, example: torch.Tensor) -> str:
        """Edit the model in place. `example` is a batch of two zeros on the model's device."""
        raise NotImplementedError


class ChannelsLast(Edit):
    """Weights and images in NHWC order, which convolution kernels read faster; nothing for transformers."""

    memory_format = "channels_last"

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        shape = run.data.shape()
        if shape is not None and len(shape) != 3:
            yield f"surgery=[channels_last] wants images, but the data gives {list(shape)}: leave it out"

    def apply(self, model: torch.nn.Module, example: torch.Tensor) -> str:
        model.to(memory_format=torch.channels_last)
        return f"{sum(p.ndim == 4 for p in model.parameters())} weights in channels-last order"


class NoBiasBeforeNorm(Edit):
    """Remove biases that a BatchNorm subtracts again at once, whatever the modules are called.

    Found by following a batch through the model, operation by operation: a convolution's or linear layer's output goes
    into one batch norm over its own channels, and nowhere else. The bias is folded into the running mean, so that
    outputs stay the same in evaluation too.
    """

    def apply(self, model: torch.nn.Module, example: torch.Tensor) -> str:
        removed = before_norm(model, example)
        norms = sum(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules())
        if norms and not removed:
            return f"no bias before a BatchNorm to remove: none of the model's {norms} BatchNorms subtracts one"
        for bias, running_mean in removed:
            if running_mean is not None:
                running_mean -= bias.detach()
        gone = {id(bias) for bias, _ in removed}
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if id(parameter) in gone:
                    module._parameters[name] = None
        return f"{len(removed)} biases before a BatchNorm removed"


class SyncBn(Edit):
    """BatchNorm over all ranks' samples: what one process with the whole batch would see.

    torch.nn.SyncBatchNorm on CUDA; on a CPU, where that does not run, the same in plain operations.
    """

    ranks_meet_in_forward = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.parallel.thread_per_device:
            yield "surgery=[sync_bn] needs a process for each device, which parallel=dp has not: set parallel=ddp"
        if run.compile.active and not run.compile.ranks_meet_in_forward and run.parallel.ranks() > 1:
            yield (
                f"surgery=[sync_bn] and {run.named('compile')} exclude each other (the ranks' statistics meet within the "
                "forward): set compile=inductor or none"
            )
        edits = [type(edit) for edit in run.surgery]
        if NoBiasBeforeNorm in edits and edits.index(type(self)) < edits.index(NoBiasBeforeNorm):
            yield (
                "surgery=[sync_bn,no_bias_before_norm]: no_bias_before_norm no longer knows a norm that sync_bn has changed: "
                "put it first"
            )

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.parallel.ranks() > 1 and run.batch.accumulation_steps > 1:
            yield (
                "surgery=[sync_bn] joins the ranks' samples; the micro-batches of "
                f"{run.named('batch')} still have their statistics each"
            )

    def apply(self, model: torch.nn.Module, example: torch.Tensor) -> str:
        norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
        ranks = torch.distributed.get_world_size() if norms and torch.distributed.is_initialized() else 1
        if norms and ranks == 1:
            return f"BatchNorms left as they are: one process sees the whole batch (sync_bn, {len(norms)} of them)"
        from drivetrain.surgery.sync_batchnorm import synchronise

        unknown = {type(m).__name__ for m in norms if not synchronise(m, example.is_cuda)}
        if unknown:
            raise UserError(
                f"surgery=[sync_bn] does not know how to synchronise {', '.join(sorted(unknown))}: leave sync_bn out, "
                "or use torch's BatchNorm in the model"
            )
        return f"{len(norms)} BatchNorms synchronised over {ranks} ranks"


class FusedNorm(Edit):
    """Norms that the model writes out by hand become torch's single kernel: LayerNorm, and on CUDA RMSNorm.

    torch.nn's own norms and timm's are that already; torch has no such kernel for a norm with its activation
    (compile=inductor fuses those), and none for RMSNorm on a CPU.
    """

    def apply(self, model: torch.nn.Module, example: torch.Tensor) -> str:
        from drivetrain.surgery.handwritten_norms import find, fuse

        done, left = Counter[str](), 0
        for module, form in find(model, example):
            if form.kind == "rms_norm" and not example.is_cuda:
                left += 1
                continue
            fuse(module, form)
            done[f"{type(module).__name__} to {form.kind}"] += 1
        rest = f"; {left} RMSNorms left: torch has no single kernel for them on a {example.device.type}" if left else ""
        which = ", ".join(f"{n} {name}" for name, n in done.items()) or "no norm is written out by hand" * (not left)
        return f"{done.total()} hand-written norms fused" + (f" ({which})" if which else "") + rest


def own_statistics(model: torch.nn.Module, seen: int, whole: int, ranks: int) -> list[str]:
    """A line for a model whose BatchNorms see `seen` of an update's `whole` samples at once: its parts are not the whole."""
    from drivetrain.surgery.sync_batchnorm import is_synchronised

    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm) and not is_synchronised(m)]
    if not norms or seen >= whole:
        return []
    joined = "; surgery=[sync_bn] joins those of the ranks" if ranks > 1 else ""
    return [f"{len(norms)} BatchNorms have their statistics of {seen} samples at a time, not of an update's {whole}{joined}"]


def _option(edit: Edit) -> str:
    """The option as the user names it: FusedNorm is surgery=fused_norm."""
    return f"surgery={re.sub(r'(?<!^)(?=[A-Z])', '_', type(edit).__name__).lower()}"


def apply_all(edits: list[Edit], model: torch.nn.Module, example: torch.Tensor) -> list[str]:
    """Apply the edits in the order given; what each changed. Raises UserError for one that found nothing to change."""
    said = []
    for edit in edits:
        line = edit.apply(model, example)
        if line.startswith("0 "):
            raise UserError(f"{_option(edit)} has no effect on this model ({line}): leave it out")
        said.append(line)
    return said
