"""What a recipe is worth: written, verified, compared."""
