"""How the ranks of a job are started: job files, the node check, torchrun with exit codes, and launchers of sweeps."""
