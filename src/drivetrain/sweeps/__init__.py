"""`-m`: sweeps and searches. Every job is a run of its own, in a process and a folder of its own."""

from drivetrain.sweeps.driver import run as run
from drivetrain.sweeps.launchers import SignalForwarder as SignalForwarder
from drivetrain.sweeps.launchers import run_one as run_one
from drivetrain.sweeps.store import SweepJob as SweepJob
from drivetrain.sweeps.store import is_sweep_recipe as is_sweep_recipe
from drivetrain.sweeps.store import prepare as prepare
from drivetrain.sweeps.store import prepare_one as prepare_one
