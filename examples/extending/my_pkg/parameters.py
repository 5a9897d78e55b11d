"""drivetrain parameters: how many parameters the model has that the overrides compose."""

from __future__ import annotations

import argparse

from drivetrain.cli.arguments import Command
from drivetrain.data import Data
from drivetrain.launch.job import prepare
from drivetrain.model import Model

HELP = "drivetrain parameters [group=option] [key=value] …      the model's parameters, counted before anything is trained"


def count(given: argparse.Namespace) -> int:
    """Run the verb; its exit code. Raises UserError, of which the command line prints the problems and exits with 2."""
    run = prepare(given.overrides, given.config_dir).run  # composed and validated; torch is not imported yet
    import torch

    data = Data.of(run).load(torch.device("cpu"))
    parameters = list(Model.of(run).create(data.shape, data.classes).parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    print(f"{run.named('model')}: {sum(p.numel() for p in parameters):,} parameters, {trainable:,} of them trainable")
    return 0


command = Command("parameters", count, HELP)
