"""What a user sees of a run: whether it can work at all, how fast it goes, what it gets right."""
