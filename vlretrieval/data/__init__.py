"""Records in, tensors out. Knows nothing of models."""
