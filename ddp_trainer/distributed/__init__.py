"""The process group, and what each rank needs around it: environment, seeds, failure monitor and graceful stop."""
