"""From overrides to a result: the job, its processes, and what keeps them running."""
