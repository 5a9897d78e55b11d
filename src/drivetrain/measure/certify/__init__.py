"""Is this the same mathematics? A few updates of two runs, with the same samples, measured against what rounding gives."""
