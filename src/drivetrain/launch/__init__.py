"""From overrides to a result: the job, its processes, and their supervision."""
