"""The losses, the optimizers and the learning-rate schedules, built from their configs."""
