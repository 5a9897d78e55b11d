"""surgery=[sync_bn]: BatchNorm statistics over the samples of all ranks, and a warning about partial statistics."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options.option import RunSpec
from drivetrain.core.step.modules import put_in_place
from drivetrain.core.step.trees import Tree
from drivetrain.surgery.base import Edit
from drivetrain.surgery.no_bias_before_norm import NoBiasBeforeNorm


class SyncBn(Edit):
    """Compute BatchNorm statistics over the samples of all ranks, as one process with the whole batch does.

    On CUDA a norm becomes torch.nn.SyncBatchNorm. On a CPU, where that does not run, plain operations do the same.
    """

    effect = "changes"
    changes = "BatchNorm takes its statistics from all ranks' samples"
    ranks_meet_in_forward = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.parallel.thread_per_device:
            yield (
                f"surgery=[sync_bn] needs a process for each device, which {run.named('parallel')} does not have: "
                "set parallel=ddp"
            )
        if run.compile.active and not run.compile.ranks_meet_in_forward and run.parallel.ranks() > 1:
            yield (
                f"surgery=[sync_bn] and {run.named('compile')} exclude each other (the ranks' statistics meet within the "
                "forward): set compile=inductor or none"
            )
        edits = [type(edit) for edit in run.surgery]
        if NoBiasBeforeNorm in edits and edits.index(SyncBn) < edits.index(NoBiasBeforeNorm):
            yield (
                "surgery=[sync_bn,no_bias_before_norm]: no_bias_before_norm does not recognise a norm that sync_bn has changed: "
                "put no_bias_before_norm first"
            )

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.parallel.ranks() > 1 and run.batch.accumulation_steps > 1:
            yield (
                "surgery=[sync_bn] joins the samples of the ranks, but not the micro-batches of "
                f"{run.named('batch')}: each micro-batch still has its own statistics"
            )

    def apply(self, model: torch.nn.Module, example: Tree) -> str:
        norms = _batch_norms(model)
        ranks = torch.distributed.get_world_size() if norms and torch.distributed.is_initialized() else 1
        if norms and ranks == 1:
            return f"BatchNorms unchanged: one process sees the whole batch (sync_bn, {len(norms)} of them)"
        from drivetrain.surgery.rank_norms import synchronised

        new = {norm: synchronised(norm, by_torch=next(model.parameters()).device.type != "cpu") for norm in norms}
        unknown = {type(norm).__name__ for norm, made in new.items() if made is None}
        if unknown:
            raise UserError(
                f"surgery=[sync_bn] does not know how to synchronise {', '.join(sorted(unknown))}: leave sync_bn out, "
                "or use torch's BatchNorm in the model"
            )
        put_in_place(model, ((norm, made) for norm, made in new.items() if made is not None))
        return f"{len(norms)} BatchNorms synchronised over {ranks} ranks"


def partial_statistics(model: torch.nn.Module, samples: int, update_samples: int, ranks: int) -> list[str]:
    """A one-line warning if BatchNorms see only `samples` of an update's `update_samples` at once; else nothing.

    Such a run differs from one that computes the statistics of the whole batch.
    """
    from drivetrain.surgery.rank_norms import is_synchronised

    norms = [m for m in _batch_norms(model) if not is_synchronised(m)]
    if not norms or samples >= update_samples:
        return []
    remedy = "; surgery=[sync_bn] joins those of the ranks" if ranks > 1 else ""
    return [
        f"{len(norms)} BatchNorms compute their statistics from {samples} samples at a time, not from an update's "
        f"{update_samples}{remedy}"
    ]


def _batch_norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
