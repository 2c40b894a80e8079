"""NumPy's arrays in a pickle of somebody else, built without NumPy's own unpickling.

An array of objects, or a data type with other flags, would make NumPy use bytes of the file as
addresses of the memory.
"""

import re
from typing import Any

import numpy as np


class PlainType:
    """The data type of numbers: bool, int, uint, float or complex; None stands for another."""

    def __init__(self, text: Any, *_: Any) -> None:
        is_number = isinstance(text, str) and re.fullmatch(r"[<>|=]?[fiubc][0-9]{1,2}", text)
        self.dtype = np.dtype(text) if is_number else None

    def __setstate__(self, state: Any) -> None:
        if self.dtype is not None:
            self.dtype = self.dtype.newbyteorder(state[1])


class PlainArray:
    """An array of numbers of any shape."""

    array: Any = None
    """The NumPy array; None if its values are not numbers."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, data = state
        self.array = build(data, kind, shape, "F" if is_fortran else "C").array


def build(data: Any, kind: PlainType, shape: Any, order: Any, *_: Any) -> PlainArray:
    """Return an array, as ``numpy._core.numeric._frombuffer`` does."""
    new = PlainArray()
    if isinstance(kind, PlainType) and kind.dtype is not None:
        numbers = np.frombuffer(data, kind.dtype)
        new.array = numbers.reshape(shape, order="F" if order == "F" else "C")
    return new


def scalar(kind: PlainType, data: Any = b"") -> Any:
    """Return a number, as ``numpy._core.multiarray.scalar`` does; None if it is none."""
    array = build(data, kind, (), "C").array
    return None if array is None else array[()]


STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): PlainType,
    ("numpy", "ndarray"): PlainArray,
    ("multiarray", "_reconstruct"): PlainArray,
    ("multiarray", "scalar"): scalar,
    ("numeric", "_frombuffer"): build,
}
"""In place of NumPy's classes and functions, by the last part of the module and the name."""
