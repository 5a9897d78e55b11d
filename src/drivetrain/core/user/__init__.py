"""The user's own functions, classes and callbacks, and the state that they keep."""
