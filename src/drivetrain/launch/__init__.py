"""A job becomes processes, and a result."""
