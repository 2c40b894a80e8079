"""The commands of ``python -m ddp_trainer``, one module for each, and the code that they share."""

COMMANDS = {
    "train": "train a model; the default",
    "evaluate": "score a checkpoint of a run on a split, on any number of ranks",
    "predict": "classify image files with the model of a run",
    "export": "write the model of a run as safetensors, torch.export or ONNX",
    "inspect": "examine a data set before training: copies, damaged files, wrong labels",
    "report": "write a page about one or several runs",
    "benchmark": "compare all synchronization strategies on the same job",
    "plan": "predict the step time on more ranks than are available",
    "doctor": "examine this machine, or the machines of a job",
    "verify": "check a run directory",
    "freeze": "compose and check a config, and write it to a job file",
    "node-check": "check that the nodes of a job can start together; used by the launch scripts",
}
