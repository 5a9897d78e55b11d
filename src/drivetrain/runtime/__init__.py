"""Device, seed, threads and backend flags."""

from drivetrain.runtime.base import Runtime

__all__ = ["Runtime"]
