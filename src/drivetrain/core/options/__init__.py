"""The option: its settings, its run, and its interface to options of other groups."""
