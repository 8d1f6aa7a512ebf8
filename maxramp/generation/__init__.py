"""Text from a model: sampling, and the programs that read prompts and write answers."""
