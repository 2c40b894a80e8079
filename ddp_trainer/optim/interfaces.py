"""The types of a loss and of a learning-rate schedule."""

from collections.abc import Callable

from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]
"""A function of logits, float32 [B, C], and labels that returns the loss of each sample, [B].

The labels are int64 [B], or with mixup and CutMix float32 [B, C]: the probability of each class.
"""
Factor = Callable[[int], float]
"""A function from the optimizer step, counted from 0, to the learning rate divided by its peak."""
