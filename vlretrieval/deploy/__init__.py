"""From a checkpoint to something others can use: load, export, search. Meets no Lightning."""
