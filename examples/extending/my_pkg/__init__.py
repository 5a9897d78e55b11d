"""Options and a verb from outside of drivetrain: one of each kind. docs/extending.md explains them."""
