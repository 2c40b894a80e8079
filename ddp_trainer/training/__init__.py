"""The loop and its events, the optimizer step, losses, optimizers, control points, evaluation."""
