"""Class names in the cells of a CSV file, which a spreadsheet may open."""

import re

FORMULA = re.compile(r"'*([=@\t\r]|[+-](?![\d.]+$))")
"""The beginning of a formula, also after apostrophes, so that `from_cell` can remove the added one.
"""


def to_cell(name: str) -> str:
    """Return `name` for a CSV file, with an apostrophe before a name that would be a formula.

    A spreadsheet executes a formula of a stranger. A number, such as the class -1, stays as it is.
    """
    return f"'{name}" if FORMULA.match(name) else name


def from_cell(cell: str) -> str:
    """Return the class name that `to_cell` has changed to `cell`."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell[1:]) else cell
