"""Wrong words of a new user: the answer is the command that works, and special characters are taken
as they are.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image
from processes import launch, run_command, succeed
from runs import TINY

from ddp_trainer.config.errors import USER_ERROR

ROOT = Path(__file__).parents[1]
QUICK = (*TINY, "max_steps=1", "logger=[]")


def answer(*words: str, cwd: Path) -> str:
    """Return the line that answers a wrong command."""
    done = launch(*words, cwd=cwd)
    assert (done.code, done.output.count("\n")) == (USER_ERROR, 1), done.output
    return done.output.strip()


def settings_in(text: str) -> list[str]:
    """Return the settings that an answer proposes, after its last colon."""
    return [word for word in shlex.split(text.rpartition(": ")[2]) if "=" in word]


@pytest.mark.parametrize(
    ("word", "library"),
    [
        ("resnet50", "torchvision"),
        ("ResNet34", "torchvision"),
        ("efficientnet-b0", "torchvision"),
        ("vit_b_16", "torchvision"),
        ("convnext_tiny", "torchvision"),
        ("vit_tiny_patch16_224", "timm"),
    ],
)
def test_the_name_of_an_architecture(word: str, library: str, tmp_path: Path) -> None:
    text = answer(*TINY, f"model={word}", cwd=tmp_path)
    assert text.startswith(f"error: model={word} is not a valid choice: write model={library} ")
    choice, arch = text.rpartition("write ")[2].split()
    config = succeed(*TINY, choice, arch, "--cfg", "job", cwd=tmp_path).output
    assert f"name: {library}" in config
    assert arch.replace("=", ": ").removeprefix("model.") in config


@pytest.mark.parametrize(
    ("words", "proposal"),
    [
        ("model.pretrained=true", "model.weights=FILE"),
        ("pretrained=true", "model.weights=FILE"),
        ("learning_rate=0.1", "optimizer.lr"),
        ("amp=true", "precision=bf16"),
        ("gpus=2", "NPROC=2 launch/local.sh"),
        ("devices=2", "torchrun --nproc_per_node=2"),
        ("optimizer=adam", "did you mean adamw?"),
        ("lr=0.1", "did you mean optimizer.lr"),
        ("batch_size=32", "or global_batch_size?"),
        ("data=fashionmnist", "did you mean fashion_mnist?"),
    ],
)
def test_keys_and_choices_of_other_programs(words: str, proposal: str, tmp_path: Path) -> None:
    text = answer(*TINY, words, cwd=tmp_path)
    assert text.startswith(f"error: {words} is ")
    assert proposal in text


def write_pictures(folder: Path, count: int = 12) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (20, 20), (20 * number, 99, 7)).save(folder / f"{number}.png")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with split/train/CLASS, split/val/CLASS and plain/CLASS."""
    root = tmp_path_factory.mktemp("pictures")
    for name in ("cat", "dog"):
        for folder in (root / "split/train", root / "split/val", root / "plain"):
            write_pictures(folder / name)
    return root


FOLDERS = ("data=imagefolder", "data.image_size=16", "model=lenet", "global_batch_size=4")


@pytest.mark.parametrize(
    "place", ["split/train", "split/val", "split/train/cat", "split/val/dog", "plain/cat", "plain"]
)
def test_a_folder_too_deep_or_without_splits(place: str, pictures: Path, tmp_path: Path) -> None:
    words = (*FOLDERS, f"data.cache_dir={tmp_path}", f"output_dir={tmp_path}", "max_steps=1")
    text = answer(*words, f"data.root={pictures / place}", cwd=tmp_path)
    proposed = re.findall(r"data\.(?:root|validation_fraction)=\S+", text.rpartition(" set ")[2])
    if place == "plain":
        proposed = [f"data.root={pictures}/plain", "data.validation_fraction=0.2"]
        assert text.endswith(" with data.validation_fraction=0.2")
    assert proposed, text
    succeed(*words, *proposed, cwd=tmp_path)


@pytest.mark.parametrize("name", ["My Photos (2026)", "a,b (c)", "größe#1"])
def test_a_folder_with_special_characters_as_the_name_of_a_data_set(
    name: str, pictures: Path, tmp_path: Path
) -> None:
    (tmp_path / name).symlink_to(pictures / "split")
    text = answer(*FOLDERS[1:], f"data={name}", cwd=tmp_path)
    assert "write data=imagefolder " in text, text
    words = (*FOLDERS, "max_steps=1", f"data.cache_dir={tmp_path}")
    succeed(*words, *settings_in(text)[1:], cwd=tmp_path)


def test_a_folder_as_the_name_of_a_data_set(pictures: Path, tmp_path: Path) -> None:
    for word in (f"data={pictures / 'split'}", str(pictures / "split")):
        text = answer(*QUICK, word, cwd=tmp_path)
        assert text.endswith(f"write data=imagefolder data.root={pictures / 'split'}"), text
    text = answer("model=lenet", f"data.root={pictures / 'split'}", cwd=tmp_path)
    assert text.endswith("; for a folder of images, add data=imagefolder"), text


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which outputs/ has two runs."""
    folder = tmp_path_factory.mktemp("outputs")
    for name in ("digits-lenet-ddp", "pets"):
        succeed(*QUICK, f"name={name}", cwd=folder)
    return folder


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("outputs/digits-lenet", "outputs/digits-lenet-ddp"),
        ("outputs/digts-lenet-ddp", "outputs/digits-lenet-ddp"),
        ("digits-lenet-ddp", "outputs/digits-lenet-ddp"),
        ("outputs/pet", "outputs/pets"),
        ("pets", "outputs/pets"),
        ("outputs/pets/checkpoints/best.pt", "outputs/pets"),
        ("outputs/pets/config.yaml", "outputs/pets"),
        ("outputs", "outputs/digits-lenet-ddp or outputs/pets"),
    ],
)
def test_a_mistyped_run_directory(path: str, meant: str, outputs: Path) -> None:
    commands = ["evaluate", "export", "predict", "report", "verify"]
    command = commands[len(path) % len(commands)]
    if (command, path) == ("report", "outputs"):
        succeed(command, path, cwd=outputs)  # the folder stands for the runs in it
        return
    images = ["."] if command == "predict" else []
    text = answer(command, path, *images, cwd=outputs)
    assert text == (
        f"error: {path} is not a run directory: it has neither config.yaml nor checkpoints/; did"
        f" you mean {meant}?"
    )


CHARACTERS = "()[]{}#,;:&|<>!?*^%$@'\"\\`~=+é日 "


@pytest.mark.parametrize("character", CHARACTERS)
def test_a_path_with_a_special_character(character: str, tmp_path: Path) -> None:
    """It is taken as it is; with a comma, the answer has the quoted form."""
    word = f"output_dir=my{character}runs"
    if character == ",":
        [word] = settings_in(answer(*QUICK, word, cwd=tmp_path))
    output = succeed(*QUICK, word, "--cfg", "job", cwd=tmp_path).output
    assert yaml.safe_load(output)["output_dir"] == f"my{character}runs"


def test_a_path_that_begins_with_a_tilde(tmp_path: Path) -> None:
    succeed(*QUICK, "output_dir=~/runs (1)", "name=run", HOME=str(tmp_path))
    assert (tmp_path / "runs (1)/run/checkpoints").is_dir()


@pytest.mark.parametrize("command", ["evaluate", "predict", "inspect"])
def test_the_launch_script_runs_each_command(command: str, outputs: Path, pictures: Path) -> None:
    words = {
        "evaluate": ["outputs/pets"],
        "predict": ["outputs/pets", str(pictures / "plain/cat")],
        "inspect": ["data=digits"],
    }
    done = run_command(
        [str(ROOT / "launch/local.sh"), command, *words[command]],
        cwd=outputs,
        NPROC="2",
    )
    assert done.code == 0, done.output
    assert len(done.output.splitlines()) <= 15, done.output


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--experiment few_images", "--experiment: keys have no dashes, experiment=CHOICE"),
        ("--model=lenet", "--model=lenet: keys have no dashes, model=CHOICE"),
        ("export --format onnx run", "--format: options have no dashes, format=VALUE"),
        ("export run --format=onnx", "--format=onnx: options have no dashes, format=onnx"),
        ("data.root = x", "no spaces around =: write data.root=x"),
        ("data.root = 'my photos'", "no spaces around =: write 'data.root=my photos'"),
        ("'data.root = my photos'", "no spaces around =: write 'data.root=my photos'"),
        ("freeze x.json 'optimizer.lr =0.1'", "no spaces around =: write optimizer.lr=0.1"),
        ("data.root =", "no spaces around =: write data.root=VALUE"),
        ("experiment= few_images", "no spaces around =: write experiment=few_images"),
        ("evaluate run =x", "no spaces around =: write run=x"),
    ],
)
def test_dashes_and_spaces_are_answered_with_what_to_write(words: str, answer: str) -> None:
    done = launch(*shlex.split(words))
    assert done.code == USER_ERROR
    assert answer in done.output.splitlines()[-1]


def test_an_empty_value_before_an_option_is_no_mistake(tmp_path: Path) -> None:
    done = launch("freeze", str(tmp_path / "x.json"), "name=x", "data.root=", "--cfg", "job")
    assert "no spaces" not in done.output


@pytest.mark.parametrize("words", ["", "verify run", "report run", "plan", "freeze x.json"])
def test_a_current_directory_that_was_deleted(words: str, tmp_path: Path) -> None:
    command = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -m ddp_trainer {words}"
    done = run_command(["bash", "-c", command], cwd=tmp_path)
    assert done.code == USER_ERROR
    assert done.output == (
        "error: the current directory does not exist any more: cd to another directory\n"
    )


def test_a_folder_of_almost_this_name_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "My Photos (2026)").mkdir()
    done = launch("data=imagefolder", f"data.root={tmp_path}/My Photo (2026)")
    assert done.code == USER_ERROR
    assert f"did you mean 'data.root={tmp_path}/My Photos (2026)'?" in done.output


def test_the_help_of_a_launch_script_is_that_of_training() -> None:
    done = run_command([str(ROOT / "launch/local.sh"), "--help"])
    assert done.code == 0
    assert "key=value" in done.output
