"""Optimizers: torch's own, those of drivetrain.optimizer.algorithms, timm's and apex's; fast forms by default."""

from drivetrain.optimizer.base import Optimizer, eager_step, without_compiler
from drivetrain.optimizer.builtin import Adafactor, Adagrad, Adam, AdamW, RmsProp, Sgd
from drivetrain.optimizer.groups import parameter_groups
from drivetrain.optimizer.layerwise import Lamb, Lars, NovoGrad, NvLamb
from drivetrain.optimizer.library import ApexAdam, ApexLamb, ApexNovoGrad, ApexSgd, Timm
from drivetrain.optimizer.recent import Lion, Muon, ScheduleFree

__all__ = [
    "Adafactor", "Adagrad", "Adam", "AdamW", "ApexAdam", "ApexLamb", "ApexNovoGrad", "ApexSgd", "Lamb", "Lars", "Lion",
    "Muon", "NovoGrad", "NvLamb", "Optimizer", "RmsProp", "ScheduleFree", "Sgd", "Timm",
    "eager_step", "parameter_groups", "without_compiler",
]  # fmt: skip
