"""Model FLOPs utilization: the share of the devices' peak that goes into the model's own operations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from drivetrain.core.peak_flops import Peak, peak
from drivetrain.engine.flops import ModelFlops


@dataclass
class Mfu:
    """The model FLOPs utilization (MFU) of a run (Chowdhery et al. 2022, PaLM, appendix B)."""

    model: ModelFlops
    device: torch.device
    number_format: str  # of the matrix products, as in peak_flops
    devices: int  # over all ranks

    def at(self, samples_per_second: float | None) -> float | None:
        """Return the MFU at a rate; None where the model's operations cannot be counted, or the peak is not known."""
        if self.model.per_sample is None or samples_per_second is None or self._peak is None:
            return None
        return self.model.per_sample * samples_per_second / (self.devices * self._peak.flops)

    def note(self) -> str:
        """Return what the MFU is a share of, or why there is none."""
        if self.model.reason:
            return self.model.reason
        unknown = f"the peak of this device in {self.number_format} can neither be looked up nor measured"
        return f"of {self.devices} × {self._peak.source}" if self._peak is not None else unknown

    @cached_property
    def _peak(self) -> Peak | None:
        """The peak of one device, which is looked up or measured when it is first needed: at a record, between timed steps."""
        try:
            return peak(self.device, self.number_format)
        except RuntimeError:  # out of memory, or no matrix products in this format
            return None


def number_format(model: torch.nn.Module, autocast: str | None) -> str:
    """Return the number format of a model's matrix products, under autocast to a dtype or without it."""
    own = next((str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()), "float32")
    dtype = autocast or own
    return "tf32" if dtype == "float32" and torch.get_float32_matmul_precision() != "highest" else dtype
