"""The search for what makes a run faster."""
