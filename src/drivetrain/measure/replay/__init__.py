"""`drivetrain replay`: what happened at an update of a run."""
