"""What an option is: its settings, the run that it belongs to, and what options of other groups know of it."""
