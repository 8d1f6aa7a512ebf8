"""A job of a run: its start, its folder, and its end, for every command that trains."""
