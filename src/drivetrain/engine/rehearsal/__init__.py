"""A built trainer's own step on tensors without values: what it allocates and computes, before anything is run."""
