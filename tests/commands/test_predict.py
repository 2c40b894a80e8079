"""``predict`` and `load`: the probabilities of ``evaluate``, in order; bad files are named."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from processes import clean_environment, launch, run_command
from runs import train_on

import ddp_trainer
from ddp_trainer.checkpoint.file import write_file
from ddp_trainer.commands import evaluate, predict
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.data.dataset import BadImageError
from ddp_trainer.data.images.decoding import Box, center_box, resize
from ddp_trainer.tools.classifier import Classifier, pixels_of, read_file
from ddp_trainer.tools.prediction import find_pictures
from ddp_trainer.tools.preprocessing import Preprocessing
from ddp_trainer.tools.trained_model import read_checkpoint

COMMON = ("model=lenet", "precision=fp32", "max_steps=20", "logger=[]", "num_threads=1")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of pictures of many sizes with a folder per class."""
    root = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for name, level in (("dark", 124), ("light", 132)):
            (root / split / name).mkdir(parents=True)
            for number in range(40):
                size = random.integers(20, 60, 2)
                pixels = random.normal(level, 60, (*size, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def run_dir(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train_on(
        1,
        *COMMON,
        "data=imagefolder",
        f"data.root={images}",
        "data.image_size=16",
        "global_batch_size=16",
        f"data.cache_dir={folder}",
        f"output_dir={folder}",
        "name=run",
    )
    return folder / "run"


def predicted(
    capsys: pytest.CaptureFixture[str], run_dir: Path, *words: str
) -> tuple[list[dict[str, Any]], str]:
    """Return the lines on stdout, and stderr."""
    predict.main([str(run_dir), *words])
    captured = capsys.readouterr()
    return [json.loads(line) for line in captured.out.splitlines()], captured.err


def test_probabilities_are_those_of_an_evaluation_of_the_same_files(
    run_dir: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate.main([str(run_dir)])
    mistakes = json.loads((run_dir / "evaluation/best-validation/mistakes.json").read_text())
    metrics = json.loads((run_dir / "evaluation/best-validation/metrics.json").read_text())
    capsys.readouterr()
    lines, _ = predicted(capsys, run_dir, str(images / "val"))
    assert [line["path"] for line in lines] == sorted(map(str, (images / "val").rglob("*.png")))
    by_path = {line["path"]: line for line in lines}
    wrong = [path for path, line in by_path.items() if Path(path).parent.name != line["label"]]
    assert sorted(wrong) == sorted(mistake["path"] for mistake in mistakes)
    assert 1 - len(wrong) / len(lines) == pytest.approx(metrics["top1"])
    assert wrong
    for mistake in mistakes:
        line = by_path[mistake["path"]]
        assert line["label"] == mistake["prediction"]
        assert line["probability"] == pytest.approx(mistake["probability"], abs=1e-6)
        assert line["top"][0] == [line["label"], line["probability"]]
        assert sum(value for _, value in line["top"]) == pytest.approx(1)


def test_bad_files_are_named_and_the_order_is_kept(
    run_dir: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [
        str(images / "val/dark/0.png"),
        str(images / "val/light/1.png"),
        str(images / "val/dark/2.png"),
    ]
    (tmp_path / "text.png").write_text("text")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "a\nb.jpg").symlink_to(good[0])
    words = [
        good[1],
        str(tmp_path / "text.png"),
        good[0],
        str(tmp_path / "empty"),
        good[2],
        str(tmp_path / "a\nb.jpg"),
    ]
    lines, errors = predicted(capsys, run_dir, *words, "batch_size=2", "top=1")
    assert [line["path"] for line in lines] == [good[1], good[0], good[2], words[-1]]
    assert [len(line["top"]) for line in lines] == [1] * 4
    bad = [line for line in errors.splitlines() if "cannot be read" in line]
    assert bad == [
        f"{tmp_path}/text.png cannot be read: its format is unknown, or it is not an image",
        f"{tmp_path}/empty cannot be read: it is empty",
    ]
    assert "4 images, 2 could not be read" in errors


@pytest.mark.parametrize("separator", ["\n", "\0"])
def test_paths_come_from_stdin_and_a_reader_may_stop_early(
    separator: str, run_dir: Path, images: Path
) -> None:
    paths = sorted(map(str, (images / "val").rglob("*.png")))
    command = [sys.executable, "-m", "ddp_trainer", "predict", str(run_dir), "-"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(separator.join(paths * 40))
        process.stdin.close()
        assert json.loads(process.stdout.readline())["path"] == paths[0]
        process.stdout.close()  # as head -1 does
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        assert process.wait(60) == 128 + signal.SIGPIPE


def test_a_path_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Image.new("L", (4, 4)).save(tmp_path / "a b.png")
    assert find_pictures(["~/a b.png", "~"], []) == [str(tmp_path / "a b.png")] * 2


def test_several_ranks_are_refused(run_dir: Path, images: Path) -> None:
    done = launch("predict", str(run_dir), str(images), ranks=2)
    assert done.code != 0
    assert done.output.count("error: predict runs in one process: start it without torchrun") == 1


def test_a_full_disk_is_one_line_and_exit_1(run_dir: Path, images: Path) -> None:
    command = f"{sys.executable} -m ddp_trainer predict {run_dir} {images} > /dev/full"
    done = run_command(["sh", "-c", command])
    assert done.code == 1
    assert "error: the output cannot be written (No space left on device)" in done.output
    assert "Traceback" not in done.output


# --- the library call -----------------------------------------------------------------------------


def test_a_classifier_takes_paths_images_arrays_and_tensors(run_dir: Path, images: Path) -> None:
    classifier = ddp_trainer.load(run_dir)
    assert isinstance(classifier, Classifier)
    assert classifier.class_names == ["dark", "light"]
    path = images / "val/light/3.png"
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    array = np.array(picture)
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    forms = [path, str(path), picture, array, tensor]
    [expected] = classifier(path)
    assert [classifier(form) for form in forms] == [[expected]] * 5
    for form in (forms, [array, array], np.stack([array, array]), tensor[None].repeat(3, 1, 1, 1)):
        assert [prediction.label for prediction in classifier(form)] == [expected.label] * len(form)  # type: ignore[arg-type]
    probabilities = classifier.probabilities([path] * 130)
    assert probabilities.shape == (130, 2)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(130))
    assert classifier([]) == []


def test_pictures_of_any_size_and_color_reach_a_model_of_gray_digits(digits_run: Path) -> None:
    classifier = ddp_trainer.load(digits_run, checkpoint="last", device="cpu")
    digit = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    [expected] = classifier(digit)
    for form in (digit[:, :, None], np.stack([digit] * 3, 2), digit.repeat(20, 0).repeat(20, 1)):
        [prediction] = classifier(form)
        assert prediction.label == expected.label
        assert prediction.probability == pytest.approx(expected.probability, rel=0.05)
    wide = np.full((80, 200), 255, np.uint8)
    wide[:, 60:140] = digit.repeat(10, 0).repeat(10, 1)
    assert classifier(wide)[0].probability == pytest.approx(expected.probability, rel=0.05)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_an_opened_picture_is_read_as_its_file(channels: int, tmp_path: Path) -> None:
    """Of 16 bits, negative, turned by its EXIF data, gray, with a palette or transparent."""
    values = np.arange(48, dtype=np.int32).reshape(6, 8)
    color = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(6, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 6
    pictures: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "deep.png": (Image.fromarray((values * 80).astype(np.uint16)), {}),
        "negative.tiff": (Image.fromarray(values * 50 - 1024), {}),
        "gray.png": (color.convert("L"), {"exif": exif}),
        "palette.png": (color.convert("RGB").quantize(16), {"exif": exif}),
        "alpha.png": (color, {"exif": exif}),
    }
    for name, (image, options) in pictures.items():
        image.save(tmp_path / name, **options)
        with Image.open(tmp_path / name) as opened:
            pixels = pixels_of(opened, channels)
        assert torch.equal(pixels, read_file(tmp_path / name, channels)), name
    with pytest.raises(BadImageError, match="its pixels are floating-point numbers"):
        pixels_of(Image.new("F", (8, 6)), 3)


def test_errors_of_the_library_call_name_the_cause(run_dir: Path, tmp_path: Path) -> None:
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: ddp_trainer.load(tmp_path), ConfigError, "is not a run directory"),
        (
            lambda: ddp_trainer.load(run_dir, checkpoint="first"),
            ConfigError,
            "checkpoint=first of .* choose from best",
        ),
        (
            lambda: ddp_trainer.load(run_dir, device="gpu"),
            ConfigError,
            "device=gpu must be one of auto, cpu, cuda",
        ),
        (
            lambda: ddp_trainer.load(run_dir)(tmp_path / "missing.png"),
            BadImageError,
            r"/missing\.png: No such file",
        ),
        (
            lambda: ddp_trainer.load(run_dir)(np.zeros((8, 8, 3))),
            ValueError,
            "pixels must be uint8",
        ),
        (
            lambda: ddp_trainer.load(run_dir)(np.zeros((8, 8, 2), np.uint8)),
            ValueError,
            "the image has 2 channels",
        ),
    ]
    for call, kind, message in wrong:
        with pytest.raises(kind, match=message):
            call()


def test_a_picture_is_prepared_as_the_data_set_says_or_refused(
    run_dir: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole pictures that are scaled, and a data set that does not say how it prepares them."""
    picture = tmp_path / "wide.png"
    Image.fromarray(
        np.arange(48 * 16 * 3, dtype=np.uint32).astype(np.uint8).reshape(16, 48, 3)
    ).save(picture)
    prepared = tmp_path / "prepared.png"
    Image.fromarray(np.full((16, 16, 3), 99, np.uint8)).save(prepared)
    path, state = read_checkpoint(run_dir, "last")
    for center_crop in ("stretch", None):
        copy = tmp_path / f"run-{center_crop}"
        (copy / "checkpoints").mkdir(parents=True)
        changed = {**state["preprocessing"], "center_crop": center_crop}
        write_file(copy / "checkpoints" / path.name, state | {"preprocessing": changed})
    stretched = ddp_trainer.load(tmp_path / "run-stretch")
    whole = resize(read_file(picture), Box(0, 0, 16, 48), (16, 16))
    assert torch.equal(stretched.probabilities(picture), stretched.of_pixels(whole[None]))
    lines, errors = predicted(capsys, tmp_path / "run-None", str(picture), str(prepared))
    assert [line["path"] for line in lines] == [str(prepared)]
    assert f"{picture} cannot be read" in errors
    assert "it has 48 × 16 pixels, and the model expects 16 × 16" in errors
    assert "add the member center_crop to the data set" in errors


@pytest.mark.parametrize("seed", range(5))
def test_the_part_of_a_picture_is_that_of_an_evaluation(seed: int) -> None:
    preprocessing = Preprocessing(
        mean=[0.5], std=[0.5], image_shape=(3, 224, 224), center_crop=0.875
    )
    for height, width in np.random.default_rng(seed).integers(1, 3000, (200, 2)).tolist():
        assert preprocessing.box(height, width) == center_box(height, width)


def test_without_one_image_that_can_be_read_the_exit_code_is_2(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_text("text")
    with pytest.raises(SystemExit, match=r"^2$"):
        predict.main([str(run_dir), str(tmp_path)])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("error: no image could be read: the reasons are above\n")


def test_a_line_has_no_control_character(
    run_dir: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a\x1b[31m\x9b31mb.png"
    path.symlink_to(images / "val/dark/0.png")
    predict.main([str(run_dir), str(path)])
    line = capsys.readouterr().out.removesuffix("\n")
    assert line.isprintable()
    assert json.loads(line)["path"] == str(path)
