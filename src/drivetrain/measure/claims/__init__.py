"""Claims: what a recipe is worth, written into recipes, verified again, and compared."""
