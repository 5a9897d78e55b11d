"""One rank of a run: build it, step it, train it."""
