"""ema=post_hoc: averages with a width chosen after the run."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.core.lazy import torch
from drivetrain.core.options.option import BuildContext, Count, RunSpec
from drivetrain.core.typed import StateDict
from drivetrain.ema.base import Kept, Width


class PostHoc(Kept):
    """Two power-function averages (Karras et al. 2024, section 3): average ← β · average + (1 - β) · weights, with

        β = (1 - 1 / t)^(γ + 1)   at update t

    Each weights all updates so far in proportion to t^γ, so its width is a share of the run, of any length. Both are
    stored `snapshots` times in RUN/averages. From these, `drivetrain.ema.profiles` makes an average of another width.
    """

    effect = "changes"
    needs_real_tensors = "it writes averages as the run goes"

    def __init__(self, width: Width = 0.05, wider: Width = 0.1, snapshots: Count = 16) -> None:
        self.width, self.wider, self.snapshots = width, wider, snapshots

    def validate(self, run: RunSpec) -> Iterator[str]:
        name = run.named("ema")
        if self.wider <= self.width:
            yield f"ema.wider={self.wider:g} is not above ema.width={self.width:g}: set ema.width=0.05 ema.wider=0.1"
        if not run.parallel.whole_model:
            yield (
                f"{name} stores averages of the whole model, and with {run.named('parallel')} each device has a part of it: "
                "set parallel=ddp, or ema=ema"
            )
        if not run.saving.active:
            yield f"{name} stores averages for use with a checkpoint, but {run.named('saving')} writes none: set saving=last"
        elif run.saving.sharded:
            yield f"{name} and saving.sharded=true exclude each other (averages are stored whole): set saving.sharded=false"

    def setup(self, context: BuildContext) -> None:
        from drivetrain.ema import profiles

        super().setup(context)
        self._powers = [profiles.power(width) for width in (self.width, self.wider)]
        self._second = [mean.clone() for mean in self._mean]
        self._run_dir = context.run_dir if context.writes_files else None
        self._stored: dict[str, str] = {}  # updates of each stored pair → SHA-256 of its file
        if self._run_dir is not None:
            profiles.refuse_link(self._run_dir)
        self._end = context.horizon.updates

    def update(self) -> None:
        super().update()
        t = self._updates
        for mean, power in zip((self._mean, self._second), self._powers, strict=True):
            self._move(mean, 1 - (1 - 1 / t) ** (power + 1))
        self._copy_buffers()
        if self._run_dir is not None and t * self.snapshots // self._end > (t - 1) * self.snapshots // self._end:
            from drivetrain.ema import profiles

            self._stored[str(t)] = profiles.store(self._run_dir, self.state_dict())

    def state_dict(self) -> StateDict:
        second = dict(zip(self._names, self._second, strict=False))  # copied buffers come last
        return {**super().state_dict(), "widths": [self.width, self.wider], "wider": second, "stored": dict(self._stored)}

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self._stored = dict(state.get("stored", {}))
        if "wider" in state:
            for name, mean in zip(self._names, self._second, strict=False):
                mean.copy_(state["wider"][name])
        else:  # the checkpoint has another average or none: it begins again
            self._updates = 0
            torch._foreach_copy_(self._second, self._mean)
