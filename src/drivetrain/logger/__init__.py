"""Where metrics are written: config group `logger`, a list of options."""

from drivetrain.logger.base import Logger, numbers
from drivetrain.logger.files import Csv, Files
from drivetrain.logger.guarded import Guarded, guarded
from drivetrain.logger.images import Images
from drivetrain.logger.mlflow import MLflow
from drivetrain.logger.tensorboard import TensorBoard
from drivetrain.logger.wandb import Wandb

__all__ = ["Csv", "Files", "Guarded", "Images", "Logger", "MLflow", "TensorBoard", "Wandb", "guarded", "numbers"]
