"""The optimizers that drivetrain ships; built through drivetrain.optimizer."""
