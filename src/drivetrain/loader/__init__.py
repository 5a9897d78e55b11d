"""How samples get from the data to the device."""

from drivetrain.loader.auto import Auto
from drivetrain.loader.base import Loader, Pipeline
from drivetrain.loader.dali import Dali
from drivetrain.loader.device import Device
from drivetrain.loader.resident import Resident
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers

__all__ = ["Auto", "Dali", "Device", "Loader", "Pipeline", "Resident", "Threads", "Workers"]
