"""Recipes: files with all settings of a run, and the folder in which a run saves its results."""

from polyformer.training.recipes.fit import fit, fit_stages, stages
from polyformer.training.recipes.recipe import ModelChoice, Recipe, find_recipe, recipe_names
from polyformer.training.recipes.run import Run

__all__ = ["ModelChoice", "Recipe", "Run", "find_recipe", "fit", "fit_stages", "recipe_names", "stages"]
