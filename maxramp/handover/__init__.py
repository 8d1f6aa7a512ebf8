"""A model there is, to go on from (`opening`), and one that is handed on (`export`)."""
