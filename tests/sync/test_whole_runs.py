"""World-size invariance and resume for every strategy, with the whole trainer; and the errors of
strategies.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import (
    BATCHNORM,
    TINY,
    assert_bitwise,
    compose,
    newest_checkpoint,
    read_summary,
    records,
    train_all,
    trained_state,
)

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.training_run import run

STRATEGIES = {
    "ddp": ("sync=ddp",),
    "allreduce": ("sync=allreduce",),
    "allreduce-parameter": ("sync=allreduce", "sync.bucket=parameter"),
    "ring": ("sync=ring",),
    "parameter_server": ("sync=parameter_server",),
    "parameter_server-two": ("sync=parameter_server", "sync.num_servers=2"),
    "async_parameter_server": ("sync=async_parameter_server", "sync.max_staleness=0"),
    "fsdp": ("sync=fsdp",),
    "channel_parallel": ("sync=channel_parallel",),
    "pipeline": ("sync=pipeline", "sync.num_stages=3"),
    "local_sgd": ("sync=local_sgd", "sync.every_steps=1"),
}
OPTIMIZERS = {
    "sgd": (),
    "clipped": ("max_grad_norm=0.5",),
    "adamw": ("optimizer=adamw", "optimizer.eps=1e-3"),
}
"""With Adam's usual eps, 1e-8, the rounding of a tiny gradient becomes a step of full size."""
CASES = [
    "ddp-sgd",
    "ddp-clipped",
    "ddp-adamw",
    "allreduce-clipped",
    "allreduce-parameter-clipped",
    "ring-clipped",
    "parameter_server-clipped",
    "parameter_server-adamw",
    "parameter_server-two-clipped",
    "parameter_server-two-adamw",
    "async_parameter_server-clipped",
    "async_parameter_server-adamw",
    "fsdp-clipped",
    "fsdp-adamw",
    "channel_parallel-clipped",
    "channel_parallel-adamw",
    "pipeline-clipped",
    "pipeline-adamw",
    "local_sgd-sgd",
]
"""Of local SGD with clipping or Adam, the mean of the updates is not the update of the mean."""
RUN = (
    *TINY,
    "logger=[jsonl]",
    "checkpoint.every_steps=3",
    "checkpoint.keep_last=100",
    "data.augment.random_crop_padding=2",
)


def overrides_of(case: str) -> tuple[str, ...]:
    sync, optimizer = case.rsplit("-", 1)
    small = ("data.num_train=60", "data.num_eval=5")  # five steps an epoch
    return (*RUN, *small, *STRATEGIES[sync], *OPTIMIZERS[optimizer], f"name={case}")


# --- world-size invariance ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function that trains every case on so many ranks, on one rank those of DDP only, and
    returns the folder of their runs.
    """

    @functools.cache
    def train(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"W{ranks}")
        cases = CASES if ranks > 1 else [f"ddp-{optimizer}" for optimizer in OPTIMIZERS]
        train_all(ranks, [(*overrides_of(case), f"output_dir={folder}") for case in cases])
        return folder

    return train


@pytest.mark.parametrize("case", CASES)
def test_a_strategy_trains_on_three_ranks_as_on_one_and_as_ddp_does(
    case: str, trained: Callable[[int], Path]
) -> None:
    run = trained(3) / case
    ddp = f"ddp-{case.rsplit('-', 1)[1]}"
    for other in (trained(1) / ddp, trained(3) / ddp):
        digests = [
            [record["samples/digest"] for record in records(one, "samples/digest")]
            for one in (run, other)
        ]
        assert digests[0] == digests[1]
        for key in ("model", "optimizer"):
            torch.testing.assert_close(tensors_of(run, key), tensors_of(other, key))
    assert read_summary(run)["sync"] == case.split("-")[0]


def tensors_of(run_dir: Path, key: str) -> dict:
    state = newest_checkpoint(run_dir)[key]
    return state["state"] if key == "optimizer" else state


@pytest.mark.parametrize("optimizer", ["clipped", "adamw"])
def test_a_server_without_staleness_is_a_server_that_waits(
    optimizer: str, trained: Callable[[int], Path]
) -> None:
    cases = [f"{name}-{optimizer}" for name in ("async_parameter_server", "parameter_server")]
    assert_bitwise(*(trained_state(trained(3) / case) for case in cases))


# --- resume ------------------------------------------------------------------------------------


def cut_back(run_dir: Path, step: int, *, to: Path) -> None:
    """Make `to` the run directory of a launch that was killed after its save at `step`."""
    shutil.copytree(run_dir, to)
    for path in (to / "checkpoints").glob("*.pt"):
        if path.stem != f"step-{step:08d}":
            path.unlink()


def test_killed_after_a_save_and_resumed_is_bitwise_the_same(
    trained: Callable[[int], Path], tmp_path: Path
) -> None:
    ranks = 3
    for case in CASES:
        cut_back(trained(ranks) / case, 3, to=tmp_path / case)
    train_all(ranks, [(*overrides_of(case), f"output_dir={tmp_path}") for case in CASES])
    for case in CASES:
        assert_bitwise(trained_state(trained(ranks) / case), trained_state(tmp_path / case))
        steps = [
            [
                record["step"]
                for record in records(folder / case)
                if "launch/world_size" not in record
            ]
            for folder in (trained(ranks), tmp_path)
        ]
        assert steps[0] == steps[1], "what was logged after the save is logged once"


def test_a_run_is_continued_without_sharding_and_on_other_ranks_with_it(
    trained: Callable[[int], Path], tmp_path: Path
) -> None:
    shutil.copytree(trained(3) / "ddp-adamw", tmp_path / "whole")
    cut_back(trained(3) / "fsdp-adamw", 3, to=tmp_path / "parts")
    common = (*overrides_of("ddp-adamw"), f"output_dir={tmp_path}", "name=parts")
    train_all(2, [(*common, "max_steps=6")])
    train_all(4, [(*common, "sync=fsdp")])
    for key in ("model", "optimizer"):
        torch.testing.assert_close(
            tensors_of(tmp_path / "whole", key), tensors_of(tmp_path / "parts", key)
        )


def test_a_run_goes_through_pipelines_of_other_lengths_and_through_ddp(
    trained: Callable[[int], Path], tmp_path: Path
) -> None:
    shutil.copytree(trained(3) / "ddp-adamw", tmp_path / "whole")
    cut_back(trained(3) / "pipeline-adamw", 3, to=tmp_path / "parts")
    common = (*overrides_of("ddp-adamw"), f"output_dir={tmp_path}", "name=parts")
    train_all(4, [(*common, "max_steps=6", "sync=pipeline", "sync.schedule=gpipe")])
    train_all(2, [common])
    for key in ("model", "optimizer"):
        torch.testing.assert_close(
            tensors_of(tmp_path / "whole", key), tensors_of(tmp_path / "parts", key)
        )


def test_sharded_averages_of_blocks_are_those_of_ddp(tmp_path: Path) -> None:
    small = ("optimizer.lr=0.001", "max_steps=5")  # because BatchNorm amplifies rounding errors
    common = (*RUN, *BATCHNORM, *small, "ema.decay=0.9", f"output_dir={tmp_path}")
    sharded = (*common, "sync=fsdp", "name=fsdp")
    train_all(3, [(*common, "name=ddp"), (*sharded, "max_steps=3"), sharded])
    ddp, fsdp = (newest_checkpoint(tmp_path / name) for name in ("ddp", "fsdp"))
    for key in ("ema", "model"):
        torch.testing.assert_close(ddp[key], fsdp[key])


def test_split_channels_have_the_statistics_of_the_whole_batch(tmp_path: Path) -> None:
    small = ("optimizer.lr=0.001", "max_steps=5", "ema.decay=0.9", f"output_dir={tmp_path}")
    common = (*RUN, *BATCHNORM, *small)
    split = (*common, "sync=channel_parallel", "name=split")
    train_all(1, [(*common, "sync=none", "name=whole")])
    train_all(3, [(*split, "max_steps=3"), split])
    whole, parts = (newest_checkpoint(tmp_path / name) for name in ("whole", "split"))
    for key in ("ema", "model"):
        torch.testing.assert_close(whole[key], parts[key])


def test_a_servers_optimizer_goes_on_with_other_owners(
    trained: Callable[[int], Path], tmp_path: Path
) -> None:
    case = "parameter_server-adamw"
    cut_back(trained(3) / case, 3, to=tmp_path / case)
    train_all(4, [(*overrides_of(case), f"output_dir={tmp_path}", "sync.num_servers=3")])
    for key in ("model", "optimizer"):
        torch.testing.assert_close(
            tensors_of(trained(3) / case, key), tensors_of(tmp_path / case, key)
        )


def test_a_server_keeps_the_state_of_parameter_groups_apart(tmp_path: Path) -> None:
    common = (*RUN, "optimizer=lars", f"output_dir={tmp_path}")
    server = (*common, "sync=parameter_server", "sync.num_servers=2")
    train_all(
        2,
        [
            (*common, "name=ddp"),
            (*server, "name=whole"),
            (*server, "name=parts", "max_steps=3"),
            (*server, "name=parts"),
        ],
    )
    whole = trained_state(tmp_path / "whole")
    torch.testing.assert_close(trained_state(tmp_path / "ddp")["optimizer"], whole["optimizer"])
    assert_bitwise(whole, trained_state(tmp_path / "parts"))


def test_local_sgd_is_saved_where_ranks_are_equal_and_goes_on_from_there(tmp_path: Path) -> None:
    overrides = (
        *RUN,
        "sync=local_sgd",
        "sync.every_steps=2",
        "optimizer=adamw",
        f"output_dir={tmp_path}",
    )
    train_all(2, [(*overrides, "name=whole")])
    saved = sorted(
        int(path.stem[5:]) for path in (tmp_path / "whole/checkpoints").glob("step-*.pt")
    )
    # due at 3, 6, 9, 12, 15 and where the epochs of 8 steps end
    assert saved == [
        4,
        6,
        8,
        10,
        12,
        16,
    ]
    for step in (4, 10):
        cut_back(tmp_path / "whole", step, to=tmp_path / f"parts{step}")
    train_all(2, [(*overrides, "name=parts4"), (*overrides, "name=parts10")])
    for parts in ("parts4", "parts10"):
        assert_bitwise(trained_state(tmp_path / "whole"), trained_state(tmp_path / parts))


# --- replicas in one process --------------------------------------------------------------------


def test_replicas_train_as_one_process_and_resume(tmp_path: Path) -> None:
    common = (*RUN, f"output_dir={tmp_path}")
    three = (*common, "sync=replicas", "sync.devices=[cpu,cpu,cpu]")
    train_all(
        1,
        [
            (*common, "sync=none", "name=alone"),
            (*three, "name=three"),
            (*three, "name=parts", "max_steps=3"),
            (*three, "name=parts"),
        ],
    )
    torch.testing.assert_close(
        tensors_of(tmp_path / "alone", "model"), tensors_of(tmp_path / "three", "model")
    )
    assert_bitwise(trained_state(tmp_path / "three"), trained_state(tmp_path / "parts"))


# --- what is lossy ------------------------------------------------------------------------------

LOSSY = {
    "fp16": ("sync.comm_hook=fp16",),
    "bf16": ("sync.comm_hook=bf16",),
    "powersgd": ("sync.comm_hook=powersgd", "sync.powersgd_warmup_steps=20"),
    "local_sgd": ("sync=local_sgd", "sync.every_steps=4"),
}


@pytest.mark.slow
def test_lossy_strategies_reach_the_same_accuracy_on_digits(tmp_path: Path) -> None:
    common = (
        "model=lenet",
        "data=digits",
        "epochs=14",
        "global_batch_size=64",
        "optimizer.lr=0.1",
        "precision=fp32",
        "logger=[]",
        f"output_dir={tmp_path}",
    )
    train_all(
        2,
        [
            (*common, "name=ddp"),
            *((*common, *extra, f"name={name}") for name, extra in LOSSY.items()),
        ],
    )
    exact = read_summary(tmp_path / "ddp")["eval/top1"]
    assert exact > 0.97
    for name in LOSSY:
        assert abs(read_summary(tmp_path / name)["eval/top1"] - exact) <= 0.01, name
    weights = {
        name: torch.cat([p.flatten() for p in tensors_of(tmp_path / name, "model").values()])
        for name in ("ddp", *LOSSY)
    }
    for name in LOSSY:  # they are lossy: what was asked for is what ran
        assert not torch.equal(weights["ddp"], weights[name]), name


def test_powersgd_orders_its_messages_alike_on_all_ranks(tmp_path: Path) -> None:
    # 45 MB, which of 4 MiB would be seven buckets
    model = (
        "model=resnet18",
        "model.stem=imagenet",
    )
    hook = ("sync.comm_hook=powersgd", "sync.powersgd_warmup_steps=2", "max_steps=6")
    train_all(3, [(*TINY, *model, *hook, f"output_dir={tmp_path}", "name=run")])
    assert read_summary(tmp_path / "run")["steps"] == 6


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (
            "sync=replicas",
            2,
            "sync=replicas runs in one process only, and there are 2 ranks: use sync=ddp",
        ),
        (
            "sync=data_parallel",
            2,
            "sync=data_parallel runs in one process only, and there are 2 ranks",
        ),
        (
            "sync=parameter_server sync.num_servers=3",
            2,
            "sync.num_servers=3 must be at most the world size",
        ),
        ("sync=parameter_server precision=fp16", 2, "precision=fp16 needs all gradients"),
        ("sync=local_sgd precision=fp16", 1, "precision=fp16 needs all gradients"),
        ("sync=replicas sync.devices=[cpu,cuda:0]", 1, "must be a list of cpu, or of cuda:0"),
        ("sync=replicas sync.devices=[]", 1, "must be a list of cpu, or of cuda:0"),
        ("sync=data_parallel precision=bf16", 1, "sync=data_parallel cannot run a model in bf16"),
        ("sync=data_parallel compile=true", 1, "sync=data_parallel cannot run a compiled model"),
        ("sync=fsdp precision=fp16", 2, "precision=fp16 needs all gradients"),
        ("sync=fsdp compile=true", 2, "sync=fsdp cannot run a compiled model"),
        ("sync=fsdp optimizer=lamb", 2, "optimizer=lamb needs whole parameters"),
        ("sync=fsdp shards=2", 2, "shards=2 has its own way to sum gradients"),
        ("sync=fsdp check.every_steps=9", 2, "check.every_steps=9 needs a replica"),
        ("sync=fsdp recovery.min_ranks=1", 2, "recovery.min_ranks=1 needs ranks with the same"),
        ("sync=pipeline", 3, "sync.num_stages=2 needs a multiple of 2 ranks, not 3: start 4 ranks"),
        ("sync=pipeline sync.num_stages=1", 2, "sync.num_stages=1 must be at least 2"),
        (
            "sync=pipeline global_batch_size=12 gradient_accumulation_steps=4",
            4,
            "global_batch_size=12 must be a multiple of 16, because with sync=pipeline ranks pass"
            " shares or microbatches of others, all of one size: set global_batch_size=16, or use",
        ),
        ("sync=pipeline precision=fp16", 2, "precision=fp16 needs all gradients"),
        ("sync=pipeline compile=true", 2, "sync=pipeline cannot run a compiled model"),
        ("sync=pipeline shards=2", 2, "shards=2 has its own way to sum gradients"),
        ("sync=pipeline check.every_steps=9", 2, "check.every_steps=9 needs a replica"),
        ("sync=pipeline recovery.min_ranks=2", 2, "recovery.min_ranks=2 needs ranks with the same"),
        ("sync=channel_parallel optimizer=lars", 2, "optimizer=lars needs whole parameters"),
        ("sync=channel_parallel precision=fp16", 2, "precision=fp16 needs all gradients"),
        ("sync=ddp sync.powersgd_warmup_steps=1", 2, "must be at least 2"),
        ("sync=local_sgd sync.every_steps=0", 2, "sync.every_steps=0 must be greater than 0"),
    ],
)
def test_a_strategy_that_cannot_run_there_is_refused(
    overrides: str, ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(*overrides.split()).check_world_size(ranks)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("sync=data_parallel",), "use torchrun --nproc_per_node=N -m ddp_trainer sync=ddp"),
        (("sync=replicas", "sync.devices=['cuda:0']"), "sync.devices="),
    ],
)
def test_a_strategy_without_its_devices_is_refused(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(compose(*TINY, "device=cpu", *overrides, f"output_dir={tmp_path}"))
