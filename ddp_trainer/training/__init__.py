"""The loop and its events, the optimizer step, control points, evaluation."""
