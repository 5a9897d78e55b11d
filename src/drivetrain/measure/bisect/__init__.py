"""`drivetrain bisect`: which of the changes between two configs makes the difference."""
