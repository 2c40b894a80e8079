"""Run directories as a training and an evaluation leave them, written without a training."""

import csv
import json
import math
import random
import struct
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

START = 1_790_000_000.0
"""Unix seconds of the first launch."""
STEPS_PER_EPOCH = 100
DIGITS = [f"digit {number}" for number in range(10)]


def png(pixels: Sequence[Sequence[int]]) -> bytes:
    """Return a PNG with gray `pixels`, rows of 0 to 255."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 0, 0, 0, 0)
    rows = b"".join(b"\0" + bytes(row) for row in pixels)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


@cache
def digit_png(seed: int, *, side: int = 8) -> bytes:
    """Return a PNG of noise, different for each seed."""
    numbers = random.Random(seed)
    return png([[numbers.randrange(256) for _ in range(side)] for _ in range(side)])


def train_record(step: int, time: float, numbers: random.Random) -> dict[str, Any]:
    """Return a record of training as ddp_trainer writes it."""
    loss = 2.3 * math.exp(-step / 400) + 0.05 + numbers.uniform(0, 0.08)
    parts = {
        "data_wait": 0.6,
        "forward_backward": 15.0,
        "communication": 3.0,
        "optimizer": 0.9,
        "other": 0.4,
    }
    milliseconds = {name: value * numbers.uniform(0.9, 1.2) for name, value in parts.items()}
    total = sum(milliseconds.values())
    record = {
        "time": time,
        "step": step,
        "epoch": (step - 1) // STEPS_PER_EPOCH,
        "train/loss": loss,
    }
    record |= {
        "train/top1": 1 - min(0.9, loss / 2.5),
        "optim/lr": 0.05 * (1 + math.cos(step / 700)) / 2,
    }
    record |= {"memory/peak_mb": 757.0 + step // 200, "throughput/images_per_second": 256e3 / total}
    record |= {"throughput/images_per_second_per_rank": 128e3 / total, "time/step_ms": total}
    for name, value in milliseconds.items():
        record |= {f"time/{name}_ms": value, f"time/{name}_fraction": value / total}
    return record


def write_metrics(
    run_dir: Path, *, steps: int, every: int, launches: Sequence[tuple[int, int]], seed: int
) -> None:
    """Write metrics.jsonl. launches: steps after which they begin, and world sizes."""
    numbers = random.Random(seed)
    records = []
    time = START
    sizes = dict(launches)
    for step in range(0, steps + 1, every):
        if step in sizes:
            time += 600 if step else 0
            records.append(
                {
                    "time": time,
                    "step": step,
                    "epoch": step // STEPS_PER_EPOCH,
                    "launch/world_size": sizes[step],
                }
            )
        if step:
            time += every * numbers.uniform(0.018, 0.022)
            records.append(train_record(step, time, numbers))
        if step and step % STEPS_PER_EPOCH == 0:
            loss = records[-1]["train/loss"] + 0.05
            records.append(
                {
                    "time": time + 0.5,
                    "step": step,
                    "epoch": step // STEPS_PER_EPOCH - 1,
                    "eval/loss": loss,
                    "eval/top1": 1 - min(0.9, loss / 2.4),
                    "eval/count": 355,
                    "samples/count": 1442,
                    "samples/digest": "3cea21bbb2ef8cc2",
                }
            )
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


def write_run(
    run_dir: Path,
    *,
    steps: int = 1000,
    every: int = 20,
    launches: Sequence[tuple[int, int]] = ((0, 2),),
    lr: float = 0.05,
    seed: int = 0,
) -> Path:
    """Write a run directory without evaluations, and return it."""
    (run_dir / "pictures").mkdir(parents=True)
    config = {
        "model": {"name": "resnet18", "width": 64},
        "data": {"name": "digits", "mean": [0.2872], "std": [0.354]},
        "optimizer": {"name": "sgd", "lr": lr, "momentum": 0.9},
        "name": run_dir.name,
        "seed": seed,
        "max_steps": None,
        "epochs": steps // STEPS_PER_EPOCH,
        "global_batch_size": 256,
        "deterministic": False,
        "precision": "bf16",
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    versions = {
        "ddp_trainer": "0.2.0",
        "Python": "3.11",
        "torch": "2.14.1",
        "torchvision": "0.29.1",
    }
    (run_dir / "versions.json").write_text(json.dumps(versions))
    write_metrics(run_dir, steps=steps, every=every, launches=launches, seed=seed)
    summary = {
        "status": "finished",
        "eval/split": "test",
        "eval/top1": 0.9417 - lr,
        "eval/loss": 0.2013,
        "eval/count": 355,
        "best_top1": 0.9501 - lr,
        "epochs": steps // STEPS_PER_EPOCH,
        "steps": steps,
        "seconds": 3725.5,
        "images_per_second": 12926.9,
        "mfu": None,
        "world_size": launches[-1][1],
        "device": "cpu",
        "sync": "ddp",
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2))
    (run_dir / "train.log").write_text(
        "2026-11-23 04:31:48,915 INFO 2 × cpu (gloo), fp32, num_threads=1, sync=ddp\n"
    )
    (run_dir / "pictures" / "first_batch.png").write_bytes(digit_png(1, side=80))
    return run_dir


def write_evaluation(
    run_dir: Path,
    *,
    folder: str = "best-test",
    names: Sequence[str] = DIGITS,
    wrong: int = 40,
    thumbnails: bool = True,
) -> Path:
    """Write an evaluation: 30 samples a class are right, `wrong` ones are not."""
    path = run_dir / "evaluation" / folder
    numbers = random.Random(folder)
    (path / "mistakes").mkdir(parents=True)
    matrix = [
        [30 if row == column else 0 for column in range(len(names))] for row in range(len(names))
    ]
    mistakes = []
    for number in range(wrong):
        label = numbers.randrange(len(names))
        prediction = (
            label + 1 + min(numbers.randrange(len(names) - 1), numbers.randrange(len(names) - 1))
        ) % len(names)
        matrix[label][prediction] += 1
        picture = f"mistakes/{number:08d}.png"
        if thumbnails:
            (path / picture).write_bytes(digit_png(number))
        mistakes.append(
            {
                "id": number,
                "path": f"images/{number:05d}.png",
                "label": names[label],
                "prediction": names[prediction],
                "probability": numbers.uniform(0.4, 1),
                "loss": numbers.uniform(0.9, 9),
                "picture": picture,
            }
        )
    mistakes.sort(key=lambda entry: -entry["loss"])
    (path / "mistakes.json").write_text(json.dumps(mistakes))
    with open(path / "confusion_matrix.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["", *names])
        writer.writerows([name, *counts] for name, counts in zip(names, matrix, strict=True))
    (path / "metrics.json").write_text(json.dumps(scores_of(matrix, names)))
    return path


def scores_of(matrix: list[list[int]], names: Sequence[str]) -> dict[str, Any]:
    """Return metrics.json of a confusion matrix, with invented calibration."""
    count = sum(map(sum, matrix))
    per_class = {}
    for place, name in enumerate(names):
        right = matrix[place][place]
        support = sum(matrix[place])
        predicted = sum(row[place] for row in matrix)
        per_class[name] = {
            "precision": right / predicted,
            "recall": right / support,
            "f1": 2 * right / (support + predicted),
            "support": support,
        }
    empty: dict[str, float | int | None] = {"confidence": None, "accuracy": None, "count": 0}
    bins = [empty] * 5 + [
        {
            "confidence": (place + 0.6) / 15,
            "accuracy": (place - 0.4) / 15,
            "count": 2 ** (place - 5),
        }
        for place in range(5, 15)
    ]
    right = sum(matrix[place][place] for place in range(len(names)))
    data = {"name": "digits", "root": None}
    return {
        "checkpoint": "best",
        "step": 900,
        "epoch": 9,
        "split": "test",
        "data": data,
        "loss": 0.2013,
        "top1": right / count,
        "top5": 0.9972,
        "count": count,
        "calibration_error": 0.0667,
        "calibration": bins,
        "per_class": per_class,
    }
