"""`-m`: sweeps and searches. Every job is a separate run with its own process and folder."""
