"""The report of an examination: one HTML page, script and pictures in it, opened from disk without a network."""
