"""The optimizers that drivetrain ships, as subclasses of torch.optim.Optimizer. drivetrain.optimizer has their options."""
