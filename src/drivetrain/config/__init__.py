"""The command line, a recipe and conf/ become one checked config."""
