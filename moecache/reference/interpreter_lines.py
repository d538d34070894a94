"""Interpreter lines: an expression as it is typed, and the value as Python prints it.

    >>> sorted([3, 1, 2])
    [1, 2, 3]

Template = (operation, operand, form). The operand is a short list of digits, a short list of words, a word or a
small number; the form writes it in place (`sorted([3, 1, 2])`) or through a name (`x = [3, 1, 2]`, then
`sorted(x)`). The value printed is the operation applied to the operand, by Python, while the item is made; no text
is ever executed.

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
_Operation = tuple[str, Callable[[Any], Any]]


def _digits(rng: np.random.Generator) -> list[int]:
    return rng.integers(0, 10, size=int(rng.integers(2, 5))).tolist()


def _words(rng: np.random.Generator) -> list[str]:
    return [pick(rng, WORDS) for _ in range(int(rng.integers(2, 4)))]


def _word(rng: np.random.Generator) -> str:
    return pick(rng, WORDS)


def _number(rng: np.random.Generator) -> int:
    return int(rng.integers(0, 100))


SEQUENCE: dict[str, _Operation] = {
    "sorted": ("sorted({})", sorted),
    "len": ("len({})", len),
    "first": ("{}[0]", lambda x: x[0]),
    "last": ("{}[-1]", lambda x: x[-1]),
    "rest": ("{}[1:]", lambda x: x[1:]),
    "reverse": ("{}[::-1]", lambda x: x[::-1]),
    "twice": ("{} * 2", lambda x: x * 2),
    "max": ("max({})", max),
    "min": ("min({})", min),
}
OPERATIONS: dict[str, tuple[Callable[[np.random.Generator], Any], dict[str, _Operation]]] = {
    "digits": (
        _digits,
        {
            **SEQUENCE,
            "append": ("{} + [0]", lambda x: [*x, 0]),
            "zero": ("0 in {}", lambda x: 0 in x),
            "head": ("{}[:2]", lambda x: x[:2]),
            "swap": ("[{0}[1], {0}[0]]", lambda x: [x[1], x[0]]),
        },
    ),
    "words": (
        _words,
        {
            **SEQUENCE,
            "append": ("{} + ['end']", lambda x: [*x, "end"]),
            "join": ("'-'.join({})", "-".join),
            "head": ("{}[:2]", lambda x: x[:2]),
            "swap": ("[{0}[1], {0}[0]]", lambda x: [x[1], x[0]]),
        },
    ),
    "word": (
        _word,
        {
            "len": ("len({})", len),
            "first": ("{}[0]", lambda x: x[0]),
            "last": ("{}[-1]", lambda x: x[-1]),
            "twice": ("{} * 2", lambda x: x * 2),
            "list": ("[{}]", lambda x: [x]),
            "plural": ("{} + 's'", lambda x: x + "s"),
            "pair": ("({}, 1)", lambda x: (x, 1)),
        },
    ),
    "number": (
        _number,
        {
            "next": ("{} + 1", lambda x: x + 1),
            "before": ("{} - 1", lambda x: x - 1),
            "twice": ("{} * 2", lambda x: x * 2),
            "even": ("{} % 2 == 0", lambda x: x % 2 == 0),
            "big": ("{} > 50", lambda x: x > 50),
            "pair": ("({}, 1)", lambda x: (x, 1)),
            "list": ("[{}]", lambda x: [x]),
            "str": ("str({})", str),
            "ten": ("{} + 10", lambda x: x + 10),
        },
    ),
}
FORMS = {"inline": "", "x": "x", "a": "a", "items": "items"}


def _make(operand: Callable[[np.random.Generator], Any], operation: _Operation, variable: str) -> Callable[[np.random.Generator], Item]:
    pattern, function = operation

    def make(rng: np.random.Generator) -> Item:
        value = operand(rng)
        answer = repr(function(value))
        before = f">>> {variable} = {value!r}\n" if variable else ""
        expression = pattern.format(variable or repr(value))
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
