"""What a person sees: terminal, progress, plots."""
