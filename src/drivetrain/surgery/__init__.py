"""Edits of the model before training: config group `surgery`, a list of options that are applied in the order given."""

from drivetrain.surgery.base import Edit, apply_all
from drivetrain.surgery.channels_last import ChannelsLast
from drivetrain.surgery.fused_norm import FusedNorm
from drivetrain.surgery.no_bias_before_norm import NoBiasBeforeNorm
from drivetrain.surgery.sync_bn import SyncBn, partial_statistics

__all__ = ["ChannelsLast", "Edit", "FusedNorm", "NoBiasBeforeNorm", "SyncBn", "apply_all", "partial_statistics"]
