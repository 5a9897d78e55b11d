"""The base that everything else stands on: errors, options, randomness, worlds, micro-batches."""
