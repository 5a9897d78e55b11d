"""Safe reading of recipe files by any author."""
