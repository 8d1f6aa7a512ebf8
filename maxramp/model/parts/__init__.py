"""The parts of layers: weights, products, norms, attention and its positions, MLPs, experts."""
