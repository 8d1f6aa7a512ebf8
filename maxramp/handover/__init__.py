"""Opens a model to continue from (`opening`); exports one (`export`)."""
