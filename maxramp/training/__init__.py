"""The train state, the step, and every stage's program."""
