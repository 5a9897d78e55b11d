"""The command line: one module for each verb, and the table of verbs."""
