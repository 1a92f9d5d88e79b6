"""Numbers in the lines that a script prints or logs: those with decimals, or in percent, and outside of lists.

Others may count batches, or be of the samples of one.
"""

import re
from typing import NamedTuple

_NUMBER = re.compile(r"(?<![\w.])(?<!\d:)[-+]?\d+(?:\.(\d+))?(?:e([-+]?\d+))?(?!\.?\w)(\s?%)?", re.IGNORECASE)
_LIST = re.compile(r"\[[^][]*\d[,\s]+[-+\d][^][]*\]")
_LONGEST = 5  # words of a name
_AROUND = " :=([{'\","


class Printed(NamedTuple):
    """A number, and what one of its last digit is worth."""

    value: float
    digit: float


def numbers_in(text: str) -> dict[str, Printed]:
    """Numbers by the last words before them in their line, in which `#` stands for each other number."""
    found = {}
    for line in _LIST.sub("[]", text).splitlines():
        for number in _NUMBER.finditer(line):
            decimals, exponent, percent = number.groups()
            if decimals or exponent or percent:
                before = " ".join(_NUMBER.sub("#", line[: number.start()]).split()[-_LONGEST:])
                value = float(number.group().removesuffix(percent or ""))
                digit = 10.0 ** (int(exponent or 0) - len(decimals or ""))
                found[before.strip(_AROUND)] = Printed(value, digit)
    return found
