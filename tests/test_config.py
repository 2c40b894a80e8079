"""Configs: every choice composes, equal ones have equal digests, and a run knows what changed."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import compose
from hydra.core.config_store import ConfigStore

from ddp_trainer import config as config_module
from ddp_trainer.composition import FREE_KEYS, digest, to_builtins, training_changes
from ddp_trainer.config import SCHEMAS, ConfigError, DDPConfig, Resume, SGDConfig, config_dir, flatten, register_configs
from ddp_trainer.explain import in_words, known_keys

CHOICES = [(group, choice) for group, choices in SCHEMAS.items() for choice in choices]
EXPERIMENTS = sorted(path.stem for path in (config_dir() / "experiment").glob("*.yaml"))


def plain(*overrides: str) -> dict[str, Any]:
    return to_builtins(compose(*overrides))


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_of_a_group_composes_to_its_schema(group: str, choice: str) -> None:
    config = compose(f"{group}={choice}")
    assert type(getattr(config, group)) is SCHEMAS[group][choice]
    assert getattr(config, group).name == choice


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment: str) -> None:
    assert compose(f"experiment={experiment}") != compose()


def test_every_yaml_of_a_group_has_a_schema_and_every_schema_a_yaml() -> None:
    files = {(path.parent.name, path.stem) for path in config_dir().glob("*/*.yaml")}
    assert {(group, choice) for group, choice in files if group != "experiment"} == set(CHOICES)


def test_registering_twice_changes_nothing() -> None:
    register_configs()
    before = sorted(ConfigStore.instance().list("model"))
    register_configs()
    assert sorted(ConfigStore.instance().list("model")) == before


def test_a_run_is_named_after_its_choices() -> None:
    assert compose("model=lenet", "data=synthetic").name == "synthetic-lenet-ddp"
    assert compose("name=mine").name == "mine"


def test_a_config_survives_yaml() -> None:
    once = plain("model=lenet", "precision=bf16", "resume=never")
    assert yaml.safe_load(yaml.safe_dump(once)) == once
    assert (once["precision"], once["resume"], once["model"]["init"]) == ("bf16", "never", "default")


def test_every_key_is_known_with_a_type_that_has_words() -> None:
    known = known_keys()
    for group, choice in CHOICES:
        assert set(flatten(plain(f"{group}={choice}"))) <= set(known)
    for key, hint in known.items():
        if not any(other.startswith(f"{key}.") for other in known):
            assert in_words(hint), key


def test_flattening_joins_keys_with_dots() -> None:
    assert flatten({"a": 1, "b": {"c": [2], "d": {"e": None}}}) == {"a": 1, "b.c": [2], "b.d.e": None}


def test_digests_are_equal_exactly_when_configs_are() -> None:
    assert digest(compose("seed=1")) == digest(compose("seed=1"))
    different = [(), ("seed=1",), ("optimizer.lr=0.3",), ("data.augment.flip=true",), ("resume=must",)]
    assert len({digest(compose(*overrides)) for overrides in different}) == len(different)


def test_what_does_not_change_the_training_is_free_to_change() -> None:
    free = (
        "name=x", "output_dir=y", "epochs=99", "max_steps=3", "eval_batch_size=7", "num_threads=1", "device=cpu",
        "backend=gloo", "timeout_seconds=9", "log_every_steps=3", "resume=must", "checkpoint.keep_last=9",
        "sync.bucket_cap_mb=1",
    )  # fmt: skip
    assert training_changes(plain(), plain(*free)) == []


def test_what_changes_the_training_is_named_from_old_to_new() -> None:
    new = plain("seed=1", "model=lenet", "optimizer.lr=0.5", "data.augment.crop_padding=0")
    assert training_changes(plain(), new) == [
        "data.augment.crop_padding: 1 → 0",
        "model.init: absent → default",
        "model.name: resnet18 → lenet",
        "model.stem: small → absent",
        "optimizer.lr: 0.2 → 0.5",
        "seed: 0 → 1",
    ]


def test_every_free_key_exists() -> None:
    assert set(known_keys()) >= FREE_KEYS


@pytest.mark.parametrize(("mib", "cap"), [(0.5, 4), (40, 4), (199, 4), (200, 25), (5000, 25)])
def test_auto_buckets_depend_on_the_model_alone(mib: float, cap: int) -> None:
    assert DDPConfig().cap_mb(mib * 2**20) == cap
    assert DDPConfig(bucket_cap_mb=7).cap_mb(mib * 2**20) == 7


def test_the_learning_rate_is_for_the_batch_as_given_unless_scaled() -> None:
    assert SGDConfig(lr=0.1).scaled_lr(1024) == 0.1
    assert SGDConfig(lr=0.1, scale_lr=True).scaled_lr(1024) == pytest.approx(0.1 * 1024 / 256)
    assert SGDConfig(lr=0.1, scale_lr=True, base_batch_size=512).scaled_lr(1024) == pytest.approx(0.2)


def test_a_config_made_in_python_is_checked_as_one_from_the_command_line() -> None:
    config = compose()
    assert replace(config, resume=Resume.must).resume is Resume.must
    with pytest.raises(ConfigError, match=r"^epochs=0 must be greater than 0$"):
        replace(config, epochs=0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 13])
def test_the_number_of_ranks_is_checked_against_the_batch(world_size: int) -> None:
    batch_of_12 = compose("global_batch_size=12", "num_microbatches=4")
    if world_size <= 3:
        batch_of_12.check_world_size(world_size)
    else:
        with pytest.raises(ConfigError, match=r"^global_batch_size=12 must be at least the number of ranks, 13: "):
            batch_of_12.check_world_size(world_size)
    if world_size == 3:
        with pytest.raises(ConfigError, match=r"^num_microbatches=5 must be at most the 4 samples of a rank: "):
            replace(batch_of_12, num_microbatches=5).check_world_size(world_size)


def test_the_groups_are_found_beside_a_checkout_and_inside_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "ddp_trainer"
    for folder in (package, package / "conf", tmp_path / "conf"):
        folder.mkdir()
    monkeypatch.setattr("ddp_trainer.config.__file__", str(package / "config.py"))
    with pytest.raises(FileNotFoundError, match=r"conf/config\.yaml is neither in "):
        config_dir()
    (tmp_path / "conf" / "config.yaml").touch()
    assert config_dir() == tmp_path / "conf"
    (package / "conf" / "config.yaml").touch()
    assert config_dir() == package / "conf"


def test_every_key_is_explained_where_it_is_declared() -> None:
    silent = []
    for node in ast.parse(inspect.getsource(config_module)).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and not (
                    isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                ):
                    silent.append(f"{node.name}.{ast.unparse(field.target)}")
    sections = {f"Config.{name}" for name in (*SCHEMAS, "checkpoint")} | {"DataConfig.augment"}
    assert {key for key in silent if not key.endswith(".name")} - sections == set()
