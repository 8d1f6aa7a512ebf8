"""The field's tasks: lm-eval, with our model as what it asks."""
