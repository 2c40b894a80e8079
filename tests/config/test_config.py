"""Configs: every choice composes, equal ones have equal digests, and a run knows what changed."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import compose
from hydra.core.config_store import ConfigStore

from ddp_trainer import registry
from ddp_trainer.commands.options import field_docstrings
from ddp_trainer.config.composition import (
    FREE_KEYS,
    config_digest,
    config_dir,
    register_configs,
    to_builtins,
    training_changes,
)
from ddp_trainer.config.data import AugmentConfig
from ddp_trainer.config.errors import ConfigError, flatten_keys
from ddp_trainer.config.messages import in_words, known_keys
from ddp_trainer.config.models import ModelConfig
from ddp_trainer.config.optimizers import SGDConfig
from ddp_trainer.config.schema import CheckpointConfig, Config, Resume
from ddp_trainer.config.sync import DDPConfig

CHOICES = [(group, choice) for group in registry.groups() for choice in registry.choices(group)]
EXPERIMENTS = sorted(path.stem for path in (config_dir() / "experiment").glob("*.yaml"))


def plain(*overrides: str) -> dict[str, Any]:
    return to_builtins(compose(*overrides))


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_python_and_the_command_line_have_the_same_defaults(group: str, choice: str) -> None:
    schema = registry.choices(group)[choice].schema
    chosen: Any = {choice: schema()} if group == "logger" else schema()
    options: dict[str, Any] = {group: chosen}
    assert compose(f"{group}={choice}") == Config(**options)


def test_the_defaults_of_the_root_are_the_same_too() -> None:
    assert compose() == Config()


def test_several_loggers_or_none_can_be_chosen() -> None:
    assert list(compose("logger=[jsonl,tensorboard]").logger) == ["jsonl", "tensorboard"]
    assert compose("logger=[]").logger == {}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment: str) -> None:
    assert compose(f"experiment={experiment}") != compose()


def test_no_yaml_repeats_what_the_schemas_say() -> None:
    assert {path.parent.name for path in config_dir().glob("*/*.yaml")} == {"experiment"}


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
        assert set(flatten_keys(plain(f"{group}={choice}"))) <= set(known)
    for key, hint in known.items():
        if not any(other.startswith(f"{key}.") for other in known):
            assert in_words(hint), key


def test_flattening_joins_keys_with_dots() -> None:
    assert flatten_keys({"a": 1, "b": {"c": [2], "d": {"e": None}}}) == {"a": 1, "b.c": [2], "b.d.e": None}


def test_digests_are_equal_exactly_when_configs_are() -> None:
    assert config_digest(compose("seed=1")) == config_digest(compose("seed=1"))
    different = [(), ("seed=1",), ("optimizer.lr=0.3",), ("data.augment.random_hflip=true",), ("resume=must",)]
    assert len({config_digest(compose(*overrides)) for overrides in different}) == len(different)


def test_what_does_not_change_the_training_is_free_to_change() -> None:
    free = (
        "name=x", "output_dir=y", "epochs=99", "max_steps=3", "eval_batch_size=7", "num_threads=1", "device=cpu",
        "backend=gloo", "timeout_seconds=9", "log_every_steps=3", "resume=must", "checkpoint.keep_last=9",
        "sync.bucket_cap_mb=1", "data.num_workers=7",
    )  # fmt: skip
    assert training_changes(plain(), plain(*free)) == []


def test_what_changes_the_training_is_named_from_old_to_new() -> None:
    new = plain("seed=1", "model=lenet", "optimizer.lr=0.5", "data.augment.random_crop_padding=0")
    assert training_changes(plain(), new) == [
        "data.augment.random_crop_padding: 1 → 0",
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
    batch_of_12 = compose("global_batch_size=12", "gradient_accumulation_steps=4")
    if world_size <= 3:
        batch_of_12.check_world_size(world_size)
    else:
        with pytest.raises(ConfigError, match=r"^global_batch_size=12 must be at least the world size, 13: "):
            batch_of_12.check_world_size(world_size)
    if world_size == 3:
        with pytest.raises(
            ConfigError, match=r"^gradient_accumulation_steps=5 must be at most the 4 samples of a rank: "
        ):
            replace(batch_of_12, gradient_accumulation_steps=5).check_world_size(world_size)


def test_the_groups_are_found_beside_a_checkout_and_inside_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "ddp_trainer"
    for folder in (package, package / "conf", tmp_path / "conf"):
        folder.mkdir()
    monkeypatch.setattr("ddp_trainer.config.composition.__file__", str(package / "config" / "composition.py"))
    with pytest.raises(FileNotFoundError, match=r"conf/config\.yaml is neither in "):
        config_dir()
    (tmp_path / "conf" / "config.yaml").touch()
    assert config_dir() == tmp_path / "conf"
    (package / "conf" / "config.yaml").touch()
    assert config_dir() == package / "conf"


SCHEMAS = [
    Config,
    CheckpointConfig,
    AugmentConfig,
    *(registry.choices(group)[choice].schema for group, choice in CHOICES),
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_every_key_has_a_description(schema: type) -> None:
    sections = (
        {"name", "augment", "checkpoint", *registry.groups()}
        if schema is not Config
        else {"checkpoint", *registry.groups()}
    )
    names = {field.name for field in fields(schema)} - sections
    assert names <= {name for name, text in field_docstrings(schema).items() if text}


def test_a_schema_that_is_not_registered_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^model=vgg has no schema: begin its YAML with defaults: \[resnet18, _self_\]"
    ):
        Config(model=ModelConfig(name="vgg"))
