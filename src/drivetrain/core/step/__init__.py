"""One training step and its samples: inputs as trees, random numbers, the model's call."""
