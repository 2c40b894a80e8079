"""How the ranks of a job are started: job files, the check of the nodes, torchrun with exit codes, and sweeps."""
