"""Plants faults in the source, one at a time, and tells which of them the tests see."""
