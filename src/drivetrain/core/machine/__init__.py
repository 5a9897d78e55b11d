"""The process and its machine: devices, files, signals, limits, and the changes to torch."""
