"""Hostile overrides: each is accepted, or is one line that a terminal can show, and exit code 2."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import trials
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from processes import Finished, run_forked
from runs import TINY, compose, read_summary

from ddp_trainer import registry
from ddp_trainer.commands import COMMANDS
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.keys import known_keys
from ddp_trainer.config.messages import format_config_error

VALUES = [
    "",
    "null",
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1.5",
    "true",
    "text",
    "9" * 400,
    str(2**63),
    "1e308",
    "1e-320",
    "[]",
    "[[0.5]]",
    "[1e-320]",
    "[nan]",
    "[null]",
    "[cpu,cpu:abc]",
    "[cuda:x]",
    "{}",
    "{a:1}",
    "???",
    "${foo}",
    "${seed}",
    "${oc.env:HOME}",
    "'\n'",
    "'\x1b[31m'",
    "'a b'",
    "'a=b'",
    "~nosuchuser/x",
    "/dev/null",
    "1_000",
    "0x10",
    "!!python/object:x",
]
MORE_KEYS = ["experiment", "experiment.epochs", "data.mean.x", "foo.bar", "hydra.job.x"]


LINES = [
    "output_dir=~nosuchuser/x",
    "data=fashion_mnist data.root=~nosuchuser",
    "timeout_seconds=99999999999999999999",
    "sync=replicas sync.devices=[cpu,cpu:abc]",
    "sync=replicas sync.devices=[[cpu]]",
    "sync=replicas sync.devices=cpu",
    "scheduler=step scheduler.gamma=1e308",
    "data.std=[1e-320]",
    "data.mean=[[0.5]]",
    "experiment={}",
    "data=synthetic data.height=1000000 data.width=1000000",
    "sync.bucket_cap_mb=99999999999999999999",
    "verify nowhere",
    "freeze",
    "plan ranks=0",
    "name='a=b'",
    "output_dir='a=b'",
    "logger=[]",
    "epochs=1_000",
    "checkpoint.every_seconds=1e-320",
    "output_dir='~nosuchuser/x'",
    "data=fashion_mnist data.root='~nosuchuser'",
    "train job_file=/dev/null",
    "freeze x.json world_size=-1",
    "doctor size_mib=1e400",
    "node-check head=127.0.0.1 port=0 nnodes=2 node_rank=0",
    f"node-check head=127.0.0.1 port=29999 node_rank=0 nnodes={'9' * 400}",
]
"""Command lines that once ended in a traceback, a hang or a wrong hint, and five that are odd and
valid.
"""
OVERRIDES = trials(75, full=300)
COMMAND_LINES = trials(10, full=40) + len(LINES)


def hostile_overrides(count: int) -> list[list[str]]:
    """Return a random choice of keys and values, each with the choice of a group that has
    the key.
    """

    def pairs() -> Iterator[list[str]]:
        for key in [*known_keys(), *MORE_KEYS]:
            group, _, name = key.partition(".")
            choices = (
                registry.choices(group).values()
                if group in registry.GROUPS and not registry.GROUPS[group].several
                else ()
            )
            with_key = [
                f"{group}={c.name}"
                for c in choices
                if name.partition(".")[0] in c.schema.__dataclass_fields__
            ]
            yield from ([*with_key[:1], f"{key}={value}"] for value in VALUES)

    return random.Random(0).sample(list(pairs()), count)


def assert_is_one_line(message: str) -> None:
    assert message.isprintable()
    assert 10 < len(message) < 1000


@pytest.mark.fault("hostile overrides, composed", times=OVERRIDES)
def test_adversary_overrides_compose_or_are_one_line() -> None:
    accepted = 0
    cases = hostile_overrides(OVERRIDES)
    for case in cases:
        try:
            compose(*case)
            accepted += 1
        except (ConfigError, OmegaConfBaseException, HydraException) as error:
            assert_is_one_line(format_config_error(error, case))
    assert 0 < accepted < len(cases) / 2


def run_with(overrides: list[str], folder: Path) -> Finished:
    """Make one training step on a tiny data set."""
    own = [*TINY, "max_steps=1", f"output_dir={folder}", "name=run"]
    # An override of a key replaces ours, and one of a choice goes before its keys.
    keys = {override.partition("=")[0] for override in overrides}
    words = [word for word in own if word.partition("=")[0] not in keys]
    if any(override.startswith(("data=", "data.")) for override in overrides):
        words = [word for word in words if not word.startswith(("data=", "data.", "model="))]
    if overrides[0] in COMMANDS:
        words = []
    return run_forked(["-m", "ddp_trainer", *words, *overrides], deadline=200, cwd=folder)


@pytest.mark.fault("hostile command lines", times=COMMAND_LINES)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adversary_command_lines_train_or_exit_2_with_one_line(tmp_path: Path) -> None:
    cases = [*hostile_overrides(COMMAND_LINES - len(LINES)), *map(str.split, LINES)]
    trained = 0
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        code, output = run_with(case, folder)
        if code == 0:
            trained += 1
            [summary] = folder.glob("**/summary.json")
            assert read_summary(summary.parent)["steps"] == 1, case
        else:
            assert (code, output.count("\n")) == (2, 1), (case, output)
            assert output.startswith("error: "), (case, output)
            assert_is_one_line(output.rstrip("\n"))
    assert trained >= 5
