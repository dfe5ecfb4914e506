"""Experiments: recipes, the methods they compare, and how a recipe becomes a run."""
