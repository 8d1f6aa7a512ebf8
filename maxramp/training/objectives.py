"""Which objective the keys ask for."""

from maxramp.training.keys import Recipe
from maxramp.training.loss import Objective, next_token_prediction
from maxramp.training.preferences import preference


def objective_of(recipe: Recipe) -> Objective:
    of_keys = preference if recipe.objective.use_dpo else next_token_prediction
    return of_keys(recipe.objective, recipe.model)
