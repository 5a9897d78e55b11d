"""The command, run as a user runs it: every test here starts processes of its own."""
