"""The process group, and what it needs: environment, seeds, waiting, graceful stop."""
