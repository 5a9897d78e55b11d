"""What a run leaves: its directory, its environment record, its identity, its result."""
