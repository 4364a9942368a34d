"""The head laboratory: record, measure, compare, close, remove and share attention heads, from outside the model."""
