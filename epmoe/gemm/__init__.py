"""Grouped products, quantisation, activations, and where the gradients of weights go."""
