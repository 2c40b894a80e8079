"""How ranks are started: job files, a check of the nodes, torchrun with an exit code for user errors, sweeps."""
