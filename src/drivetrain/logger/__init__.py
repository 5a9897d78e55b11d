"""Where metrics are written: config group `logger`, a list of options."""

from drivetrain.logger.aim import Aim
from drivetrain.logger.base import Logger
from drivetrain.logger.files import Csv, Files
from drivetrain.logger.guarded import Guarded, guarded
from drivetrain.logger.images import Images
from drivetrain.logger.mlflow import MLflow
from drivetrain.logger.tensorboard import TensorBoard
from drivetrain.logger.trackio import Trackio
from drivetrain.logger.wandb import Wandb

__all__ = ["Aim", "Csv", "Files", "Guarded", "Images", "Logger", "MLflow", "TensorBoard", "Trackio", "Wandb", "guarded"]
