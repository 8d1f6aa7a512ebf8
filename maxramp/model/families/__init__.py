"""Model families: a file says what the layers of one are."""
