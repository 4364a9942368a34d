"""Training: the LightningModule, parameter groups and schedules, checkpoints, exact resume."""
