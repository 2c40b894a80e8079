"""Checks, before torchrun starts, that the nodes of a job can start together.

The head is node 0. It listens on the port on which torchrun's store will listen later. On each
connection the head sends a challenge; the node answers with a report and waits for the result.
Messages are signed with a key. The key is derived from the secret that the nodes share, or, if
there is no secret, from the config. Values of the config are not sent, only digests of them.
"""
