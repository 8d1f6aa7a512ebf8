"""Opens the training data (`opening`) and loads the batch of each step (`loader`)."""
