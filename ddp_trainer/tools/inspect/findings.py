"""Everything that `inspect` finds in a data set, as lines of text and as JSON."""

import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ddp_trainer.config.errors import printable
from ddp_trainer.data.dataset import per_sample
from ddp_trainer.tools.inspect.copies import exact_copies, near_copies
from ddp_trainer.tools.inspect.labels import Suspect
from ddp_trainer.tools.inspect.scan import Scan


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of an inspection."""

    scan: Scan
    copies: list[list[int]]
    """Groups of images with the same pixels."""
    near: list[tuple[int, int, float]]
    """Pairs of near copies, and their similarity."""
    suspects: list[Suspect] | None = None
    """The images whose label is probably wrong; None without runs."""

    @property
    def groups_on_both_sides(self) -> list[int]:
        """The groups, such as patients, that have images in several splits."""
        splits = defaultdict(set)
        for name, split in self.scan.splits.items():
            groups = per_sample(split, "groups")
            for group in [] if groups is None else groups.unique().tolist():
                splits[group].add(name)
        return [group for group, names in splits.items() if len(names) > 1]

    @property
    def similar_names(self) -> list[list[str]]:
        """The class names that differ only by case, accents, spaces or signs."""
        by_key = defaultdict(list)
        for name in self.scan.class_names:
            letters = unicodedata.normalize("NFKD", name.casefold())
            by_key["".join(filter(str.isalnum, letters))].append(name)
        return [names for names in by_key.values() if len(names) > 1]

    def across(self, places: Sequence[int]) -> str:
        """Return "different splits", "different classes", both joined by " and ", or "".

        places: those of the images in the scan.
        """
        splits = len(set(self.scan.images["split"][list(places)])) > 1
        classes = len(set(self.scan.images["label"][list(places)])) > 1
        return " and ".join(["different splits"] * splits + ["different classes"] * classes)

    def counts(self) -> dict[str, int]:
        """Return the number of findings of each kind."""
        return {
            "damaged images": len(self.scan.bad),
            "groups of copies": len(self.copies),
            "near copies": len(self.near),
            "groups in several splits": len(self.groups_on_both_sides),
            "similar class names": len(self.similar_names),
            **({} if self.suspects is None else {"suspected labels": len(self.suspects)}),
        }

    def splits(self) -> dict[str, dict[str, Any]]:
        """Return for each split the number of images, of each class and of each size, and moments.

        "sizes" has height, width and number of images, from the smallest area to the largest.
        """
        scan = self.scan
        facts = {}
        for number, name in enumerate(scan.splits):
            images = scan.images[scan.images["split"] == number]
            counts = np.bincount(images["label"], minlength=len(scan.class_names)).tolist()
            sizes = Counter(images[["height", "width"]].tolist())
            mean, std = scan.mean_and_std(number)
            facts[name] = {
                "images": len(images),
                "classes": dict(zip(scan.class_names, counts, strict=True)),
                "sizes": [[*size, sizes[size]] for size in sorted(sizes, key=math.prod)],
                "mean": mean,
                "std": std,
            }
        return facts

    def lines(self) -> Iterator[str]:
        """Yield a line for each split and for each kind of finding."""
        for name, facts in self.splits().items():
            counts = facts["classes"].values()
            ends = [f"{height}×{width}" for height, width, _ in facts["sizes"]]
            if not ends:
                yield f"{name}: no image can be read"
                continue
            size = (
                ends[0] if len(ends) == 1 else f"{len(ends):,} sizes from {ends[0]} to {ends[-1]}"
            )
            yield (
                f"{name}: {facts['images']:,} images of {len(counts)} classes, {min(counts):,} to"
                f" {max(counts):,} of a class, {size} pixels; mean [{format_list(facts['mean'])}],"
                f" std [{format_list(facts['std'])}]"
            )
        for kind, count in self.counts().items():
            yield f"{kind}: {count:,}{self.detail(kind)}"

    def detail(self, kind: str) -> str:
        """Return the first damaged image, or how many copies are of different splits or classes."""
        if kind == "damaged images" and self.scan.bad:
            return f" ({printable(self.scan.bad[0][0])}{', …' * (len(self.scan.bad) > 1)})"
        groups: dict[str, list[Any]] = {
            "groups of copies": self.copies,
            "near copies": [pair[:2] for pair in self.near],
        }
        kinds = Counter(filter(None, map(self.across, groups.get(kind, []))))
        parts = [f"{number:,} of {text}" for text, number in sorted(kinds.items())]
        return f" ({', '.join(parts)})" if parts else ""

    def sample(self, place: int) -> dict[str, str]:
        """Return split, class and path of an image."""
        scan = self.scan
        return {
            "split": scan.split_name(place),
            "class": scan.class_names[scan.images["label"][place]],
            "path": scan.name(place),
        }

    def to_json(self) -> dict[str, Any]:
        """Return all findings, for a JSON file."""
        return {
            "splits": self.splits(),
            "damaged": [{"path": path, "reason": reason} for path, reason in self.scan.bad],
            "copies": [list(map(self.sample, group)) for group in self.copies],
            "near_copies": [
                {"images": [self.sample(a), self.sample(b)], "similarity": round(score, 4)}
                for a, b, score in self.near
            ],
            "groups_in_several_splits": self.groups_on_both_sides,
            "similar_class_names": self.similar_names,
            "suspected_labels": list(map(asdict, self.suspects or [])),
        }


def find(scan: Scan, suspects: list[Suspect] | None) -> Findings:
    """Compare all images of `scan`."""
    return Findings(scan=scan, copies=exact_copies(scan), near=near_copies(scan), suspects=suspects)


def format_list(values: Sequence[float]) -> str:
    """Return numbers as a list for data.mean and data.std."""
    return ",".join(f"{value:.4f}" for value in values)
