"""Train from Python on two ranks, and open the model: python examples/python_api.py

The keys of the command line are the arguments of Config. Config.compose("model=lenet", "epochs=5")
takes what the command line takes.
"""

from ddp_trainer import Config, launch, load

config = Config(
    model="lenet",
    data="digits",
    optimizer={"name": "sgd", "lr": 0.1},
    epochs=5,
    global_batch_size=64,
    name="python_api",
)

if __name__ == "__main__":  # because each rank imports this file
    summary = launch(config, num_ranks=2)
    print(f"{summary.status}: top-1 {summary.eval_top1:.4f} after {summary.steps} steps")

    classifier = load("outputs/python_api")
    print(f"classes {classifier.class_names}")
