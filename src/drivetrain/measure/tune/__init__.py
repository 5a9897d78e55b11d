"""The search for overrides that make a run faster on this machine."""
