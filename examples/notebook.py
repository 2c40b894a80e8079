# %% [markdown]
# Train in a notebook: open this file in Jupyter (jupytext) or VS Code, and run its cells.

# %%
from ddp_trainer import Config, launch, load

config = Config(model="lenet", epochs=4, global_batch_size=32, name="notebook")

# %%
# Train on two processes of this machine. Interrupt the cell to stop the training gracefully; run
# the cell again to continue it.
# Code that you register (a loss, a data set) must be in a .py file that this notebook imports.
if __name__ == "__main__":
    summary = launch(config, num_ranks=2)
    print(f"top-1 {summary.eval_top1:.4f} after {summary.steps} steps")

# %%
if __name__ == "__main__":
    classifier = load(f"{config.output_dir}/{config.name}")
    print(classifier.class_names)
