"""The use of finished runs: evaluation, prediction, export."""
