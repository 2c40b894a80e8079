"""One training run: its parts are built in `run`, one optimizer step is `TrainStep`, the loop is
`Trainer`.
"""
