"""The models that drivetrain ships; built through drivetrain.model."""
