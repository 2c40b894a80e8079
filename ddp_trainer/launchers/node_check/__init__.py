"""The check, before torchrun starts, that the nodes of a job can start together.

The head (node 0) listens at the port where torchrun's store will listen. On each connection it
sends a challenge; a node answers with a report and waits for the result. Messages are signed with a
key that is derived from the secret that all nodes have; if there is no secret, from the config. The
values in the config are not sent, only digests of them.
"""
