"""Tables and pages of any runs."""
