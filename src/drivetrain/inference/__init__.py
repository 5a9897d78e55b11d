"""Finished runs, used: evaluated again, asked for predictions, exported."""
