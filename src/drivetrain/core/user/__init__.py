"""What a user brings: functions, classes and callbacks of their own, and the state that they keep."""
