"""`-m`: sweeps and searches. Every job is a run of its own, in a process and a folder of its own."""
