"""Failures: the root cause is reported once, and no rank hangs or outlives its launcher."""
