"""The files of a run: its directory, environment record, identity and result."""
