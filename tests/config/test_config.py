"""Configs: every choice composes, equal ones have equal digests, and a run knows what changed."""

import math
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict, read_write
from runs import TINY, compose

from ddp_trainer import registry
from ddp_trainer.commands.options import field_docstrings
from ddp_trainer.config.composition import (
    config_digest,
    config_dir,
    from_builtins,
    job_dir,
    to_builtins,
    to_saved,
    training_changes,
)
from ddp_trainer.config.differences import flatten_keys
from ddp_trainer.config.errors import ConfigError, check_values
from ddp_trainer.config.images import FileAugmentConfig
from ddp_trainer.config.keys import change_keys, is_marked, known_keys, parse_value
from ddp_trainer.config.messages import in_words
from ddp_trainer.config.models import ModelConfig
from ddp_trainer.config.schema import CheckConfig, CheckpointConfig, Config, EmaConfig, Resume
from ddp_trainer.config.sync import DDPConfig

CHOICES = [(group, choice) for group in registry.GROUPS for choice in registry.choices(group)]
SCHEMAS: list[type] = [Config, CheckConfig, CheckpointConfig, EmaConfig, FileAugmentConfig]
SCHEMAS += [registry.choices(group)[choice].schema for group, choice in CHOICES]
EXPERIMENTS = sorted(path.stem for path in (config_dir() / "experiment").glob("*.yaml"))


def plain(*overrides: str) -> dict[str, Any]:
    return to_builtins(compose(*overrides))


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_python_and_the_command_line_have_the_same_defaults(group: str, choice: str) -> None:
    schema = registry.choices(group)[choice].schema
    chosen: Any = {choice: schema()} if registry.GROUPS[group].several else schema()
    options: dict[str, Any] = {group: chosen}
    assert compose(f"{group}={choice}") == Config(**options)


def test_several_loggers_or_none_can_be_chosen() -> None:
    assert compose() == Config()
    assert list(compose("logger=[jsonl,tensorboard]").logger) == ["jsonl", "tensorboard"]
    assert compose("logger=[]").logger == {}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment: str) -> None:
    assert compose(f"experiment={experiment}") != compose()


def test_no_yaml_repeats_what_the_schemas_say() -> None:
    assert {path.parent.name for path in config_dir().glob("*/*.yaml")} == {"experiment"}


def test_a_run_is_named_after_its_choices() -> None:
    assert compose("model=lenet", "data=synthetic").name == "synthetic-lenet-ddp"
    assert compose("name=mine").name == "mine"


def test_a_config_survives_yaml() -> None:
    once = plain("model=lenet", "precision=bf16", "resume=never")
    assert yaml.safe_load(yaml.safe_dump(once)) == once
    assert (once["precision"], once["resume"], once["model"]["init"]) == (
        "bf16",
        "never",
        "default",
    )


def test_every_key_is_known_with_a_type_that_has_words() -> None:
    known = known_keys()
    for group, choice in CHOICES:
        assert set(flatten_keys(plain(f"{group}={choice}"))) <= set(known)
    for key, (hint, _) in known.items():
        if not any(other.startswith(f"{key}.") for other in known):
            assert in_words(hint), key


@pytest.mark.parametrize(
    ("word", "hint", "value"),
    [
        ("name=007", str, "007"),
        ("name=null", str, "null"),
        ("data.root=a: [b", str | None, "a: [b"),
        ("data.root=null", str | None, None),
        ("num_threads=2", int | str, 2),
        ("num_threads=auto", int | str, "auto"),
        ("logger.wandb.tags=[a,1]", list[str], ["a", 1]),
        ("optimizer.lr=1e-3", float, 0.001),
    ],
)
def test_the_value_of_a_text_key_is_taken_as_it_is(word: str, hint: Any, value: object) -> None:
    assert parse_value(word, hint) == value


def test_keys_of_a_config_are_changed_as_their_types_say() -> None:
    changed = from_builtins(change_keys(plain(), ["name=007", "seed=7", "resume=must"]))
    assert changed == replace(compose(), name="007", seed=7, resume=Resume.must)


@pytest.mark.parametrize(
    ("key", "is_named"),
    [
        ("optimizer.lr", True),
        ("epochs", True),
        ("logger.jsonl.name", False),
        ("report", False),
        ("device", False),
        ("checkpoint.keep_last", False),
        ("data.root", False),
    ],
)
def test_the_schema_says_which_keys_name_the_jobs_of_a_sweep(key: str, is_named: bool) -> None:
    assert is_marked(key, "unnamed", known_keys()) != is_named


@pytest.fixture(scope="module")
def sweep_config() -> DictConfig:
    """Return a config with Hydra's own settings for a sweep."""
    compose()  # registers the config with Hydra
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        return hydra.compose("config", ["hydra.mode=MULTIRUN"], return_hydra_config=True)


def directories_of_a_sweep(
    config: DictConfig, key: str, *words: str, values: Sequence[str] = ("a", "b")
) -> list[Path]:
    """Return the run directories of a sweep over the values of `key`."""
    paths = []
    for value in values:
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.overrides.task = [f"{key}={value}", *words]
        HydraConfig.instance().set_config(config)
        paths.append(job_dir("outputs", value if key == "name" else "run"))
    return paths


@pytest.mark.parametrize("key", sorted(known_keys()))
def test_what_a_sweep_varies_is_in_the_names_of_its_jobs(
    key: str, sweep_config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    monkeypatch.setattr("sys.argv", ["train", "--multirun", f"{key}=a,b", "device=cpu", "seed=1"])
    first, second = directories_of_a_sweep(sweep_config, key, "device=cpu", "seed=1")
    if key != "output_dir":  # which is given to `job_dir` itself
        assert first != second
    assert first.is_relative_to("outputs")
    assert "seed=1" in first.name or key == "seed"
    assert ("device=a" in first.name) == (key == "device")
    assert ("device=cpu" in first.name) == (key == "device")


def test_a_path_in_a_sweep_leads_to_no_other_folder(
    sweep_config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    monkeypatch.setattr("sys.argv", ["train", "--multirun", "model.weights=x,y"])
    values = ["../../x.pt", "a/b", "a_b", "図" * 150]
    paths = directories_of_a_sweep(sweep_config, "model.weights", values=values)
    assert {path.parent for path in paths} == {Path("outputs/run")}
    assert len(set(paths)) == len(values)
    assert all(len(path.name.encode()) < 255 for path in paths)


def test_digests_are_equal_exactly_when_configs_are() -> None:
    assert config_digest(compose("seed=1")) == config_digest(compose("seed=1"))
    different = [
        (),
        ("seed=1",),
        ("optimizer.lr=0.3",),
        ("data.augment.random_hflip=true",),
        ("resume=must",),
    ]
    assert len({config_digest(compose(*overrides)) for overrides in different}) == len(different)


def test_what_does_not_change_the_training_is_free_to_change() -> None:
    free = (
        "name=x",
        "output_dir=y",
        "epochs=99",
        "max_steps=3",
        "eval_batch_size=7",
        "num_threads=1",
        "device=cpu",
        "backend=gloo",
        "timeout_seconds=9",
        "log_every_steps=3",
        "resume=must",
        "checkpoint.keep_last=9",
        "sync.bucket_cap_mb=1",
        "data.num_workers=7",
    )
    assert training_changes(plain(), plain(*free)) == []


def test_a_run_goes_on_with_another_strategy_that_averages_gradients() -> None:
    for sync in ("none", "allreduce", "ring", "parameter_server", "fsdp"):
        assert training_changes(plain(), plain(f"sync={sync}")) == []
    for word in ("sync=local_sgd", "sync.comm_hook=bf16", "sync.batch_norm=sync"):
        assert training_changes(plain(), plain(word)), word


def test_what_changes_the_training_is_named_from_old_to_new() -> None:
    new = plain("seed=1", "model=lenet", "optimizer.lr=0.5", "data.augment.random_crop_padding=0")
    assert training_changes(plain(), new) == [
        "data.augment.random_crop_padding: 1 → 0",
        "model.init: absent → default",
        "model.name: resnet18 → lenet",
        "model.stem: auto → absent",
        "optimizer.lr: 0.05 → 0.5",
        "seed: 0 → 1",
    ]


@pytest.mark.parametrize(("mib", "cap"), [(0.5, 4), (40, 4), (199, 4), (200, 25), (5000, 25)])
def test_auto_buckets_depend_on_the_model_alone(mib: float, cap: int) -> None:
    assert DDPConfig().cap_mb(mib * 2**20) == cap
    assert DDPConfig(bucket_cap_mb=7).cap_mb(mib * 2**20) == 7


def test_a_config_made_in_python_is_checked_as_one_from_the_command_line() -> None:
    config = compose()
    assert replace(config, resume=Resume.must).resume is Resume.must
    with pytest.raises(ConfigError, match=r"^epochs=0 must be greater than 0$"):
        replace(config, epochs=0)


def test_a_rank_may_have_microbatches_of_one_sample_and_a_batch_of_one() -> None:
    compose("global_batch_size=12", "gradient_accumulation_steps=4").check_world_size(3)
    compose("global_batch_size=12").check_world_size(12)


def test_every_key_has_a_description() -> None:
    sections = {"augment", "check", "checkpoint", "ema", "recovery", *registry.GROUPS}
    for schema in SCHEMAS:
        names = (
            {field.name for field in fields(schema)}
            - sections
            - (set() if schema is Config else {"name"})
        )
        assert names <= {name for name, text in field_docstrings(schema).items() if text}, schema


def test_a_schema_that_is_not_registered_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model(\.name)?=vgg "):
        Config(model=ModelConfig(name="vgg"))


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_every_rule_of_a_field_holds(schema: type) -> None:
    check_values(schema())

    def refuse(name: str, value: float | list[float], rule: str) -> None:
        section = schema()
        setattr(section, name, value)
        with pytest.raises(ConfigError, match="^" + re.escape(f"x.{name}={value} must be {rule}")):
            check_values(section, "x.")

    for field in fields(schema):
        default = getattr(schema(), field.name)
        if "holds" in field.metadata:  # every rule so far refuses -1
            refuse(field.name, [-1] if isinstance(default, list) else -1, field.metadata["must_be"])
        if isinstance(default, float):
            refuse(field.name, math.inf, "")


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:TOKEN}",
        "a${oc.env:TOKEN}b",
        r"\${oc.env:TOKEN}",
        r"\\${oc.env:TOKEN}",
        "${name}",
        "${oc.decode:${oc.env:TOKEN}}",
        "$${oc.env:TOKEN}",
        "${",
        "tail\\",
        "$",
    ],
)
def test_values_of_a_file_are_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    tree = to_builtins(compose(*TINY)) | {"output_dir": text}
    config = from_builtins(tree)
    assert config.output_dir == text
    assert to_builtins(config) == tree
    assert change_keys(tree, ["seed=3"]) == tree | {"seed": 3}
    assert change_keys(tree, ["data.mean=[1, 2]", f"name={text}"])["name"] == text


@pytest.mark.parametrize(
    ("text", "saved"),
    [
        ("https://user:secret@host:5000/x", "https://***@host:5000/x"),
        (
            "postgresql+psycopg://user:secret@host/db?x=a@b",
            "postgresql+psycopg://***@host/db?x=a@b",
        ),
        ("https://token@host", "https://***@host"),
        ("https://user:pass@word@host/x", "https://***@host/x"),
        ("https://host/a@b", "https://host/a@b"),
        ("somebody@host", "somebody@host"),
    ],
)
def test_no_password_is_saved(text: str, saved: str) -> None:
    config = replace(compose(*TINY), output_dir=text)
    assert to_saved(config)["output_dir"] == saved
    assert to_builtins(config)["output_dir"] == text
