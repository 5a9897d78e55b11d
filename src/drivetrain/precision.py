"""The number formats of a step: autocast, loss scaling, and the order unscale → clip → step → update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from drivetrain.lazy import torch
from drivetrain.spec import Count, Part, Positive, Run, needs_extra

_NULL = nullcontext()


class Precision(Part):
    """precision=fp32: everything in float32."""

    dtype: str | None = None  # autocast's

    def start(self, device: torch.device) -> None:
        """Bind to the device the step runs on."""
        self._device = device

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model in this precision, before it is compiled or wrapped."""
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of forward and loss."""
        return _NULL

    def backward(self, loss: torch.Tensor, weight: torch.Tensor) -> None:
        """Add the gradients of `weight × loss`. The weight seeds the backward, which saves a multiplication."""
        loss.backward(weight)

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], None]) -> bool:
        """Clip and update; False if the update was skipped, and then nothing may move."""
        clip()
        optimizer.step()
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take `state_dict()` back."""


class Bf16(Precision):
    """bfloat16 autocast: float32's range in 16 bits, so no loss scaling."""

    dtype = "bfloat16"

    def start(self, device: torch.device) -> None:
        super().start(device)
        self._autocast = torch.autocast(device.type, getattr(torch, self.dtype or "bfloat16"))

    def autocast(self) -> AbstractContextManager[Any]:
        return self._autocast


class Amp(Bf16):
    """float16 autocast with dynamic loss scaling (Micikevicius et al. 2018): an overflow skips the update.

    On a CPU that has no float16 convolution, convolutions stay in float32: torch's fallback is 50 times slower.
    """

    dtype = "float16"

    def __init__(self, init_scale: Positive = 65536.0, growth_interval: Count = 2000) -> None:
        self.init_scale, self.growth_interval = init_scale, growth_interval

    def start(self, device: torch.device) -> None:
        super().start(device)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=self.init_scale, growth_interval=self.growth_interval)

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        if self._device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
            for module in model.modules():
                if isinstance(module, torch.nn.modules.conv._ConvNd):
                    _stay_float32(module)
        return model

    def backward(self, loss: torch.Tensor, weight: torch.Tensor) -> None:
        self.scaler.scale(loss).backward(weight)

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], None]) -> bool:
        self.scaler.unscale_(optimizer)
        clip()
        self.scaler.step(optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        return self.scaler.get_scale() >= before  # the scale falls exactly when an overflow was found

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)


def _stay_float32(module: torch.nn.Module) -> None:
    """Run a module's forward in float32 whatever autocast says."""
    forward = module.forward

    def in_float32(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return forward(x.float())

    module.forward = in_float32  # type: ignore[method-assign]


class Fp8(Bf16):
    """float8 matrix products in Linear layers (torchao's float8 training), bfloat16 elsewhere."""

    def check(self, run: Run) -> Iterator[str]:
        yield from needs_extra("torchao", "torchao", "precision=fp8")

    def verify(self, run: Run) -> Iterator[str]:
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
            yield "precision=fp8 needs a CUDA device of compute capability 8.9 or newer: set precision=bf16"

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        from torchao.float8 import convert_to_float8_training

        return convert_to_float8_training(
            model, module_filter_fn=lambda m, _: m.in_features % 16 == 0 and m.out_features % 16 == 0
        )
