"""Packages that need a GPU or are seldom installed, by modules of the same names that compute the same on any device."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.put import put

# The signatures are apex's. Its kernels need a build of their own and a GPU; the updates here are torch's, or plain steps.
APEX = """
import torch
class _Plain(torch.optim.SGD):
    def __init__(self, params, **group):
        super().__init__(params, lr=group["lr"], weight_decay=group["weight_decay"])
        for g in self.param_groups:
            g.update({k: v for k, v in group.items() if k not in g})
class FusedAdam(torch.optim.AdamW):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.,
                 amsgrad=False, set_grad_none=True, capturable=False, master_weights=False):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
class FusedSGD(torch.optim.SGD):
    def __init__(self, params, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False, wd_after_momentum=False,
                 materialize_master_grads=True, set_grad_none=False):
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)
class FusedLAMB(_Plain):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, amsgrad=False,
                 adam_w_mode=True, grad_averaging=True, set_grad_none=True, max_grad_norm=1.0, use_nvlamb=False):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
class FusedNovoGrad(_Plain):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0., amsgrad=False,
                 reg_inside_moment=False, grad_averaging=True, norm_type=2, init_zero=False, set_grad_none=True):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, grad_averaging=grad_averaging)
"""

# What precision=fp8 calls of torchao: both factors of a Linear layer's product are rounded to float8, and so is its gradient.
TORCHAO = """
import dataclasses
import torch
def rounded(t, dtype):
    scale = torch.finfo(dtype).max / t.abs().max().float().clamp(min=1e-12)
    return ((t.float() * scale).to(dtype).float() / scale).to(t.dtype)
class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(context, t):
        return rounded(t, torch.float8_e4m3fn)
    @staticmethod
    def backward(context, gradient):
        return rounded(gradient, torch.float8_e5m2)
@dataclasses.dataclass(frozen=True)
class Float8LinearConfig:
    recipe: str = "tensorwise"
    emulate: bool = False
    pad_inner_dim: bool = False
    @staticmethod
    def from_recipe_name(name):
        return Float8LinearConfig(name)
class Float8Linear(torch.nn.Linear):
    def forward(self, x):
        product = torch.nn.functional.linear(_Rounded.apply(x), _Rounded.apply(self.weight.to(x.dtype)))
        return product + self.bias.to(x.dtype)
def convert_to_float8_training(module, *, module_filter_fn=None, config=None):
    assert config.emulate and config.pad_inner_dim
    for name, child in list(module.named_modules()):
        if type(child) is torch.nn.Linear and module_filter_fn(child, name):
            child.__class__ = Float8Linear
    return module
"""
SOURCES = {"apex.optimizers": APEX, "torchao.float8": TORCHAO}


def installed(package: str) -> bool:
    """True if the package itself is there, and no stand-in is wanted."""
    return find_spec(package) is not None


def install(module: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a stand-in of a module below a folder, and let it be imported until the end of the test."""
    package, _, name = module.partition(".")
    put(folder / package / "__init__.py", "")
    (folder / package / f"{name}.py").write_text(SOURCES[module])
    monkeypatch.syspath_prepend(str(folder))
    for known in (package, module):
        monkeypatch.setitem(sys.modules, known, None)  # so that it is removed again when this is undone
        del sys.modules[known]
