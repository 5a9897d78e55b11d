"""One run from inside: where the time of a step goes."""
