"""`Config` as a script or a notebook makes it: what it takes, and the words in which it refuses."""

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from omegaconf import MISSING
from runs import compose

import ddp_trainer
from ddp_trainer import Config, ConfigError, LossConfig, registry, schemas
from ddp_trainer.config import schema
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.keys import Keys, keys_of
from ddp_trainer.config.messages import check_overrides, format_config_error
from ddp_trainer.public_config import checked_copy, in_yaml

CHOICES = [
    (group, choice)
    for group in registry.GROUPS.values()
    for choice in registry.choices(group.name).values()
]


def error_of(make: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    return str(caught.value)


def command_line_error(*words: str) -> str:
    try:
        check_overrides(words)
        compose(*words)
    except Exception as error:
        return format_config_error(error, words)
    raise AssertionError(f"{words} is accepted")


# --- the same line through both doors -------------------------------------------------------------


def wrong_values(hint: Any, rule: Any) -> Iterator[Any]:
    """Yield a value of a wrong type for `hint`, and one that breaks `rule`, if there are any."""
    parts = {get_origin(part) or part for part in (get_args(hint) or [hint])}
    if get_origin(hint) in (list, dict):
        yield 0.5
    elif any(isinstance(part, type) and issubclass(part, Enum) for part in parts):
        yield "no_such_word"
    elif str not in parts:
        yield "perhaps"
    if rule is not None:
        numbers = [-1, 0, 1.5, 2.0, 10**10, 2**62]
        yield from [value for value in numbers if parts & {int, float} and breaks(rule, value)][:1]
    if type(None) not in parts and hint is not Any:
        yield None


def breaks(rule: Any, value: Any) -> bool:
    try:
        return not rule(value)
    except TypeError:
        return False


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return keyword arguments that set a dotted key."""
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


def merged(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = first | other
    for key in first.keys() & other.keys():
        if isinstance(first[key], dict):
            both[key] = merged(first[key], other[key])
    return both


def check_key(
    key: str, hint: Any, metadata: Any, chosen: dict[str, Any], *words: str
) -> dict[Any, str]:
    """Compare both doors for wrong values; return the lines by wrong value."""
    values = wrong_values(hint, metadata.get("holds"))
    return {value: same_line(key, value, chosen, *words) for value in values}


def same_line(key: str, value: Any, chosen: dict[str, Any], *words: str) -> str:
    """Return the line with which both doors refuse a value."""
    arguments = merged(chosen, nested(key, value))
    expected = command_line_error(*words, f"{key}={in_yaml(value)}")
    assert error_of(lambda: Config(**arguments)) == expected
    return expected


@pytest.mark.parametrize("key", ["xepochs", "checkpoint.xkeep_last"])
def test_a_misspelt_key_is_refused_with_the_line_of_the_command_line(key: str) -> None:
    assert "did you mean" in same_line(key, 1, {})


ROOT = {
    key: entry
    for key, entry in keys_of([("", schema.Config)]).items()
    if key.partition(".")[0] not in registry.GROUPS and not is_dataclass(entry[0])
}


@pytest.mark.parametrize("key", ROOT)
def test_a_key_of_the_root_is_refused_with_the_line_of_the_command_line(key: str) -> None:
    assert check_key(key, *ROOT[key], {})


def own_keys() -> Iterator[tuple[registry.Group, registry.Choice, Keys]]:
    """Yield each choice with the keys that no earlier choice of its group has inherited as well."""
    seen = set()
    for group, choice in CHOICES:
        own: Keys = {}
        for name, (hint, metadata) in keys_of([("", choice.schema)]).items():
            declaration = (group, name, hint, id(metadata))
            if name != "name" and not is_dataclass(hint) and declaration not in seen:
                own[name] = (hint, metadata)
            seen.add(declaration)
        if own:
            yield group, choice, own


@pytest.mark.parametrize(
    ("group", "choice", "keys"),
    [pytest.param(*case, id=f"{case[0].name}-{case[1].name}") for case in own_keys()],
)
def test_a_key_of_a_choice_is_refused_with_the_line_of_the_command_line(
    group: registry.Group, choice: registry.Choice, keys: Keys
) -> None:
    key = group.key(choice.name)
    chosen = nested(f"{key}.name", choice.name)
    word = f"{group.name}=[{choice.name}]" if group.several else f"{group.name}={choice.name}"

    def from_object(**values: Any) -> Config:
        return Config(**nested(key, choice.schema(**values)))

    same_line(f"{key}.x{next(iter(keys))}", 1, chosen, word)
    for name, (hint, metadata) in keys.items():
        lines = check_key(f"{key}.{name}", hint, metadata, chosen, word)
        for value, line in lines.items():
            if "." not in name:
                assert error_of(lambda n=name, v=value: from_object(**{n: v})) == line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"modle": 1}, "modle=1 is unknown: did you mean model?"),
        ({"lr": 0.1}, "lr=0.1 is unknown: did you mean optimizer.lr?"),
        ({"gpus": 2}, "gpus=2 is unknown: the launcher sets the number of ranks: "),
        ({"model": {"init": "d2l"}}, "model.init=d2l does not belong to model=resnet18: it is a "),
        ({"model": "lenett"}, "model=lenett is not a valid choice: did you mean lenet? choose "),
        ({"model": "resnet50"}, "model=resnet50 is not a valid choice: write model=torchvision "),
        ({"model": None}, "model=null is not the name of a choice: python -m ddp_trainer --help "),
        ({"model": ["lenet"]}, "model=['lenet'] must be one choice: to run several, write "),
        ({"model": schemas.LeNetConfig}, "model=LeNetConfig is a class: write LeNetConfig()"),
        (
            {"model": schemas.SGDConfig()},
            "model is of class SGDConfig: write a name, a dict, or an object of a class that ",
        ),
        (
            {"metric": ["macro_f2"]},
            "metric=macro_f2 is not a valid choice: did you mean macro_f1?",
        ),
        ({"metric": 3}, "metric=3 is not the name of a choice: "),
        ({"observer": {"early_stopping": {"patiense": 3}}}, "observer.early_stopping.patiense=3 "),
        ({"observer": {"early_stopping": 3}}, "observer.early_stopping=3 replaces a whole section"),
        (
            {"observer": {"unknown": 3}},
            "observer.unknown is of class int: write a name, a dict, or an object of a class that ",
        ),
        (
            {"optimizer.lr": 0.1},
            'optimizer.lr is a key of the command line: write Config.compose("optimizer.lr=…")',
        ),
        (
            {"experiment": "digits_resnet18"},
            'experiment is a key of the command line: write Config.compose("experiment=…")',
        ),
        ({"checkpoint": 3}, "checkpoint=3 replaces a whole section: set the keys in it"),
        ({"epochs": 10**30}, f"epochs={10**30} must be between -2^63 and 2^63"),
        ({"name": "../x"}, "name='../x' must be one plain name, without /"),
        ({"model": {1: 2}}, "model.1=2 is unknown: model=resnet18 has freeze, name, stem, weights"),
    ],
    ids=str,
)
def test_arguments_that_are_refused(arguments: dict[str, Any], line: str) -> None:
    assert error_of(lambda: Config(**arguments)).startswith(line)


@dataclass(kw_only=True, slots=True)
class PowerConfig(LossConfig):
    name: str = "power"
    power: float = MISSING


def test_a_key_without_a_default_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = registry.Choice("power", PowerConfig, "power:build")
    monkeypatch.setitem(registry._choices["loss"], "power", choice)
    line = "loss.power is missing: give it a value"
    assert error_of(lambda: Config(loss="power")) == command_line_error("loss=power") == line
    assert Config(loss={"name": "power", "power": 2}).loss == PowerConfig(power=2.0)


# --- what it takes --------------------------------------------------------------------------------


def same(config: schema.Config, *words: str) -> bool:
    return to_builtins(config) == to_builtins(compose(*words))


def test_a_choice_is_a_name_a_mapping_or_an_object() -> None:
    for model in ("lenet", {"name": "lenet"}, schemas.LeNetConfig()):
        config = Config(model=model, optimizer={"lr": 0.02}, checkpoint={"keep_last": 1})
        assert same(config, "model=lenet", "optimizer.lr=0.02", "checkpoint.keep_last=1")
        assert isinstance(config.model, schemas.LeNetConfig)
        assert config.name == "digits-lenet-ddp"
    word = ("loss=focal", "loss.gamma=1.5")
    for loss in ({"name": "focal", "gamma": 1.5}, schemas.FocalConfig(gamma=1.5)):
        assert same(Config(loss=loss), *word)


def test_several_choices_are_names_or_a_mapping() -> None:
    words = ("observer=[early_stopping,report]", "logger=[jsonl]", "metric=[macro_f1]")
    both = ["early_stopping", "report"]
    for names in (both, tuple(both), np.array(both), (name for name in both)):
        assert same(Config(observer=names, logger="jsonl", metric=["macro_f1"]), *words)
    mapping = {"early_stopping": {"patience": 2}, "report": {}}
    objects = {
        "early_stopping": schemas.EarlyStoppingConfig(patience=2),
        "report": schemas.ReportConfig(),
    }
    for observer in (mapping, objects):
        config = Config(observer=observer)
        assert same(config, words[0], "observer.early_stopping.patience=2")


def test_objects_in_a_list_are_chosen_by_their_names() -> None:
    stopping = schemas.EarlyStoppingConfig(patience=2)
    words = ("observer=[early_stopping,report]", "observer.early_stopping.patience=2")
    assert same(Config(observer=[stopping, "report"]), *words)
    assert same(Config(metric=schemas.TopKConfig(k=3)), "metric=[topk]", "metric.topk.k=3")
    assert error_of(lambda: Config(metric=[stopping])).startswith(
        "metric.early_stopping is of class EarlyStoppingConfig: write a name, a dict, or an object "
    )
    top = [schemas.TopKConfig(k=3), schemas.TopKConfig(k=7)]
    assert error_of(lambda: Config(metric=top)).startswith("['topk', 'topk'] has a name twice: ")
    assert error_of(lambda: Config(metric=["topk", "topk"])).startswith("['topk', 'topk'] has a ")
    assert len(Config(metric={"top3": top[0], "top7": top[1]}).metric) == 2


def test_values_are_converted_as_on_the_command_line() -> None:
    config = Config(
        epochs=np.int64(3),
        seed=np.array(7),
        optimizer={"lr": np.float32(0.5)},
        output_dir=Path("runs"),
        precision="bf16",
        max_steps="20",
        model={"freeze": ("conv1", "bn1")},
    )
    assert (config.epochs, config.seed, config.max_steps) == (3, 7, 20)
    assert {type(value) for value in (config.epochs, config.seed, config.max_steps)} == {int}
    assert config.optimizer.lr == 0.5
    assert config.output_dir == "runs"
    assert config.precision is schema.Precision.bf16
    assert config.model.freeze == ["conv1", "bn1"]
    assert Config(data={"mean": np.array([0.5])}).data.mean == [0.5]
    assert to_builtins(Path("a/b")) == "a/b"
    weights = Config(loss={"class_weights": {3: 2.0}})
    assert weights.loss.class_weights == {"3": 2.0}
    assert same(weights, "loss.class_weights={3: 2.0}")
    assert Config(name="${data.name}").name == "${data.name}"  # text, not Hydra's language


def test_words_of_the_command_line_are_composed(tmp_path: Path) -> None:
    (tmp_path / "a(1)").mkdir()
    words = ("experiment=imagefolder", f"data.root={tmp_path}/a(1)", "model=lenet", "seed=3")
    config = Config.compose(*words)
    assert isinstance(config, Config)
    assert config.data.root == f"{tmp_path}/a(1)"  # type: ignore[attr-defined]
    assert same(config, words[0], f'data.root="{tmp_path}/a(1)"', *words[2:])
    assert same(Config.compose())
    for words in (["model=lenet"], Path("model=lenet")):
        line = error_of(lambda words=words: Config.compose(words))  # type: ignore[arg-type]
        assert line == "Config.compose takes texts: Config.compose('model=lenet', 'epochs=5')"
    for word in ("modle=lenet", "epochs=many", "model=a,b", "epochs", "optimizer.lr=???"):
        assert error_of(lambda word=word: Config.compose(word)) == command_line_error(word)


def test_attributes_that_were_set_are_checked_before_a_launch() -> None:
    config = Config(model="lenet")
    config.optimizer.lr = 0.3
    config.epochs = "4"  # type: ignore[assignment]
    assert (checked_copy(config).epochs, checked_copy(config).optimizer.lr) == (4, 0.3)
    config.epochs = "many"  # type: ignore[assignment]
    assert error_of(lambda: checked_copy(config)) == "epochs=many must be a whole number"
    with pytest.raises(AttributeError):
        config.epoch = 3  # type: ignore[attr-defined]
    assert error_of(lambda: checked_copy({"epochs": 1})).startswith(
        "the config is of type dict and "
    )


# --- what it shows --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Config()",
        "Config(name='mine', epochs=5)",
        "Config(model='lenet', checkpoint={'every_steps': 10})",
        "Config(data={'name': 'synthetic', 'num_train': 96}, optimizer={'name': 'sgd', 'lr': 0.2})",
        "Config(data={'name': 'digits', 'augment': {'mixup': 0.2}}, precision='bf16')",
        "Config(metric=['macro_f1', 'auroc'], observer={'early_stopping': {'patience': 3}})",
        "Config(logger=[])",
    ],
)
def test_repr_is_a_call_with_what_is_not_a_default(text: str) -> None:
    config = eval(text, {"Config": Config})
    assert repr(config) == text
    assert eval(repr(config), {"Config": Config}) == config


def test_repr_has_no_password() -> None:
    config = Config(logger={"mlflow": {"tracking_uri": "https://user:secret@host"}})
    assert "https://***@host" in repr(config)
    assert "secret" not in repr(config)


def test_every_schema_is_public() -> None:
    registered = {
        choice.schema
        for _, choice in CHOICES
        if choice.schema.__module__.startswith("ddp_trainer.")
    }
    sections = {
        hint
        for name, hint in get_type_hints(schema.Config).items()
        if is_dataclass(hint) and name not in registry.GROUPS
    }
    public = {value for value in vars(schemas).values() if isinstance(value, type)}
    assert registered | sections <= public
    assert schema.Config not in public
    assert set(ddp_trainer.__all__) <= {*dir(ddp_trainer)} | {*ddp_trainer._IMPORTED_LATER}
