"""Train from Python on two ranks, and open the model: python examples/python_api.py

Everything that the command line can set is a field of a dataclass here.
"""

from ddp_trainer import Config, launch, load
from ddp_trainer.config.data import DigitsConfig
from ddp_trainer.config.models import LeNetConfig
from ddp_trainer.config.optimizers import SGDConfig

config = Config(
    model=LeNetConfig(),
    data=DigitsConfig(),
    optimizer=SGDConfig(lr=0.1),
    epochs=5,
    global_batch_size=64,
    name="python_api",
)

if __name__ == "__main__":  # because each rank imports this file
    summary = launch(config, num_ranks=2)
    print(f"{summary.status}: top-1 {summary.eval_top1:.4f} after {summary.steps} steps")

    classifier = load("outputs/python_api")
    print(f"classes {classifier.class_names}")
