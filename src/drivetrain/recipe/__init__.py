"""Recipes as files: read safely, whoever wrote them."""
