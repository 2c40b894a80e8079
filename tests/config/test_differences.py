"""The differences of two dicts, and text made printable."""

import pytest

from ddp_trainer.config.differences import differences, differing_keys
from ddp_trainer.config.errors import printable


def test_every_key_that_differs_or_is_absent_is_named_from_first_to_other() -> None:
    first = {"seed": 0, "same": [1], "lr": 0.1}
    other = {"seed": 3, "same": [1], "name": "x"}
    assert differences(first, other) == ["lr: 0.1 → absent", "name: absent → x", "seed: 0 → 3"]
    assert differing_keys(first, other) == ["lr", "name", "seed"]
    assert differences(first, dict(first)) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("größe/it's \\ fine.png", "größe/it's \\ fine.png"),
        ("a\nb\x1b[31m", r"a\nb\x1b[31m"),
        (b"\xff.png".decode(errors="surrogateescape"), r"\udcff.png"),
    ],
)
def test_only_what_does_not_print_is_escaped(text: str, expected: str) -> None:
    assert printable(text) == expected
