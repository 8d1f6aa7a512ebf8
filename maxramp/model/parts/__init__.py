"""What layers are made of: weights, products, norms, attention and its positions, the MLP."""
