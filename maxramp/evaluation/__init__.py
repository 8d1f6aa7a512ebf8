"""lm-eval's tasks, asked of our model."""
