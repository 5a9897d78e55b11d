"""`drivetrain forecast`: memory, time and limits of a run before it is started, from its own step on fake tensors."""
