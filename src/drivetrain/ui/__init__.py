"""The terminal: messages, progress, tables and plots."""
