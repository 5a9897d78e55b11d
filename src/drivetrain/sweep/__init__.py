"""`-m`: sweeps and searches. Every job is a run of its own, in a process and a folder of its own."""

from drivetrain.sweep.driver import run as run
from drivetrain.sweep.forked import SignalForwarder as SignalForwarder
from drivetrain.sweep.forked import run_one as run_one
from drivetrain.sweep.grid import SweepJob as SweepJob
from drivetrain.sweep.grid import is_sweep_recipe as is_sweep_recipe
from drivetrain.sweep.grid import prepare as prepare
from drivetrain.sweep.grid import prepare_one as prepare_one
