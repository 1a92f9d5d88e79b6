"""Numbers in the lines that a script prints or logs: those with decimals, or in percent, and outside of lists.

Others may count batches, or be of the samples of one.
"""

import re

_NUMBER = re.compile(r"(?<![\w.])(?<!\d:)[-+]?\d+(?:\.(\d+))?(?:e([-+]?\d{1,3}))?(?!\.?\w)(\s?%)?", re.IGNORECASE)
_LIST = re.compile(r"\[[^][]*\d[,\s]+[-+\d][^][]*\]")
_LONGEST, _MOST = 5, 2000  # words of a name, and characters of a text: a longer one is no result
_AROUND = " :=([{'\","


def numbers_in(text: str) -> dict[str, tuple[float, float]]:
    """Numbers, each with what one of its last digit is worth.

    They have the last words before them in their line as names, in which `#` stands for each other number.
    """
    found = {}
    for line in _LIST.sub("[]", text).splitlines() if len(text) <= _MOST else ():
        for number in _NUMBER.finditer(line):
            decimals, exponent, percent = number.groups()
            if decimals or exponent or percent:
                before = " ".join(_NUMBER.sub("#", line[: number.start()]).split()[-_LONGEST:])
                value = float(number.group().removesuffix(percent or ""))
                digit = float(f"1e{int(exponent or 0) - len(decimals or '')}")  # no power, which may overflow
                found[before.strip(_AROUND)] = value, digit
    return found
