"""Interpreter lines: an expression as it is typed, and the value as Python prints it.

    >>> max(3, 8)
    8

Template = (operation, operand, form). The operand is a pair of digits, a number of two digits or a short word; the form
writes it in place (`max(3, 8)`) or gives it a name first (`x = 3`, then `max(x, 8)`). The value printed is the
operation applied to the operand, by Python, while the item is made; no text is ever executed.

Every operation is a table of at most a hundred entries, so what an item asks for is to find the operand and to know
the table. An earlier version (texts version 1) asked for lists of several digits or words: a model of this size that
had read 7 million tokens solved 3 % of those, because it could not copy a list.

See `tasks` for items, templates and the held-out rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moecache.reference.tasks import Item, Template, pick

_WORD_LIST = (
    "cat dog sun map red box pen cup hat bee fox ice jam key log net oak pig rat sky tea van web zoo ant bus car "
    "day egg fan gas hen ink jet kid leg mud nut owl pot arm bag cow dot ear fig gem hill iron joke king lamp moon "
    "nose palm rain sand tent bird cake desk farm gold hand lake milk nest pond rock salt tree wall yard book coin "
    "door fish goat horn knee leaf mint note pear ring ship town vase wind bell corn duck fire"
)
WORDS = tuple(_WORD_LIST.split())
_Operation = tuple[str, Callable[..., Any]]
_Operand = Callable[[np.random.Generator], tuple]


def _digits(rng: np.random.Generator) -> tuple:
    return tuple(rng.integers(0, 10, size=2).tolist())


def _number(rng: np.random.Generator) -> tuple:
    return (int(rng.integers(10, 100)),)


def _word(rng: np.random.Generator) -> tuple:
    return (pick(rng, WORDS),)


OPERATIONS: dict[str, tuple[_Operand, dict[str, _Operation]]] = {
    "digits": (
        _digits,
        {
            "add": ("{} + {}", lambda a, b: a + b),
            "subtract": ("{} - {}", lambda a, b: a - b),
            "multiply": ("{} * {}", lambda a, b: a * b),
            "max": ("max({}, {})", max),
            "min": ("min({}, {})", min),
            "greater": ("{} > {}", lambda a, b: a > b),
            "equal": ("{} == {}", lambda a, b: a == b),
            "sum": ("sum([{}, {}])", lambda a, b: a + b),
            "sorted": ("sorted([{}, {}])", lambda a, b: sorted([a, b])),
            "pair": ("[{}, {}]", lambda a, b: [a, b]),
        },
    ),
    "number": (
        _number,
        {
            "next": ("{} + 1", lambda x: x + 1),
            "before": ("{} - 1", lambda x: x - 1),
            "even": ("{} % 2 == 0", lambda x: x % 2 == 0),
            "big": ("{} > 50", lambda x: x > 50),
            "ones": ("{} % 10", lambda x: x % 10),
            "tens": ("{} // 10", lambda x: x // 10),
            "str": ("str({})", str),
            "list": ("[{}]", lambda x: [x]),
        },
    ),
    "word": (
        _word,
        {
            "len": ("len({})", len),
            "first": ("{}[0]", lambda x: x[0]),
            "last": ("{}[-1]", lambda x: x[-1]),
            "plural": ("{} + 's'", lambda x: x + "s"),
            "short": ("len({}) < 4", lambda x: len(x) < 4),
            "list": ("[{}]", lambda x: [x]),
        },
    ),
}
FORMS = {"inline": "", "x": "x", "a": "a", "n": "n"}


def _make(operand: _Operand, operation: _Operation, variable: str) -> Callable[[np.random.Generator], Item]:
    pattern, function = operation

    def make(rng: np.random.Generator) -> Item:
        values = operand(rng)
        answer = repr(function(*values))
        written = [repr(value) for value in values]
        before = f">>> {variable} = {written[0]}\n" if variable else ""
        expression = pattern.format(variable or written[0], *written[1:])
        return Item(f"{before}>>> {expression}\n", answer, answer)

    return make


def templates() -> list[Template]:
    """Every combination of operand, operation and form, in a fixed order."""
    found = []
    for operand_name, (operand, operations) in OPERATIONS.items():
        for operation_name, operation in operations.items():
            for form_name, variable in FORMS.items():
                name = f"{operand_name}-{operation_name}-{form_name}"
                found.append(Template("interpreter", name, _make(operand, operation, variable)))
    return found
