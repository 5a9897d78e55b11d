"""Loaders bring samples from the data to the device."""

from drivetrain.loader.base import Loader, Pipeline

__all__ = ["Loader", "Pipeline"]
