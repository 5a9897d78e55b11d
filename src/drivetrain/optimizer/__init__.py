"""Optimizers: config group `optimizer`. torch's own, those of drivetrain.optimizer.algorithms, timm's and apex's."""

from drivetrain.optimizer.adamw8bit import AdamW8bit
from drivetrain.optimizer.apex import ApexAdam, ApexLamb, ApexNovoGrad, ApexSgd
from drivetrain.optimizer.base import Optimizer
from drivetrain.optimizer.closures import Lbfgs, Sam
from drivetrain.optimizer.layerwise import Lamb, Lars, NovoGrad, NvLamb
from drivetrain.optimizer.lion import Lion
from drivetrain.optimizer.muon import Muon
from drivetrain.optimizer.schedulefree import ScheduleFree
from drivetrain.optimizer.shampoo import Shampoo
from drivetrain.optimizer.soap import Soap
from drivetrain.optimizer.timm import Timm
from drivetrain.optimizer.torch_optim import Adafactor, Adagrad, Adam, AdamW, RmsProp, Sgd

__all__ = [
    "Adafactor", "Adagrad", "Adam", "AdamW", "AdamW8bit", "ApexAdam", "ApexLamb", "ApexNovoGrad", "ApexSgd", "Lamb", "Lars",
    "Lbfgs", "Lion", "Muon", "NovoGrad", "NvLamb", "Optimizer", "RmsProp", "Sam", "ScheduleFree", "Sgd", "Shampoo", "Soap",
    "Timm",
]  # fmt: skip
