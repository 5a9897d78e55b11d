"""What techniques bring and cost, measured."""
