"""Word problems with one step of arithmetic: somebody has things, something happens, how many now?

    Tom has 3 apples. He buys 4 more apples. How many apples does he have now?
    3 + 4 = 7
    Answer: 7

Template = (opening, event, question). The line with the sum stands before the answer because a small model that
writes the step down gets it right more often. The answer is computed by Python's operator of the event.

See `tasks` for items, templates and the held-out rule.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moecache.reference.tasks import Item, Template, pick

PEOPLE = (
    ("Tom", "He"), ("Ann", "She"), ("Ben", "He"), ("Mia", "She"), ("Sam", "He"), ("Eva", "She"), ("Max", "He"),
    ("Lea", "She"), ("Tim", "He"), ("Zoe", "She"), ("Leo", "He"), ("Ida", "She"), ("Jack", "He"), ("Rosa", "She"),
    ("Paul", "He"), ("Nora", "She"), ("Omar", "He"), ("Lily", "She"), ("Hugo", "He"), ("Emma", "She"),
)  # fmt: skip
_THING_LIST = (
    "apples pens books coins cards stamps eggs shells cakes balls nuts stones roses cups keys plates boxes hats "
    "pears lemons stickers marbles pencils cookies"
)
THINGS = tuple(_THING_LIST.split())
OPENINGS = {
    "has": "{name} has {a} {things}.",
    "there": "There are {a} {things} in the bag of {name}.",
    "starts": "{name} starts the day with {a} {things}.",
    "owns": "{name} owns {a} {things}.",
    "morning": "In the morning {name} has {a} {things}.",
    "counts": "{name} counts {a} {things}.",
}


@dataclass(frozen=True)
class Event:
    """What happens: a sentence, the operator and its sign."""

    sentence: str
    operator: Callable[[int, int], int]
    sign: str


EVENTS = {
    "buys": Event("{who} buys {b} more {things}.", operator.add, "+"),
    "finds": Event("{who} finds {b} more {things}.", operator.add, "+"),
    "gets": Event("{who} gets {b} {things} from {friend}.", operator.add, "+"),
    "gives": Event("{who} gives {b} {things} to {friend}.", operator.sub, "-"),
    "loses": Event("{who} loses {b} {things}.", operator.sub, "-"),
    "sells": Event("{who} sells {b} {things}.", operator.sub, "-"),
    "times": Event("{friend} has {b} times as many {things}.", operator.mul, "*"),
}
QUESTIONS = {
    "now": "How many {things} does {name} have now?",
    "are": "How many {things} are there now?",
    "end": "How many {things} does {name} have in the end?",
    "count": "What is the number of {things} now?",
    "total": "How many {things} is that?",
}
TIMES_QUESTIONS = {
    "friend": "How many {things} does {friend} have?",
    "of": "How many {things} are in the bag of {friend}?",
    "what": "What is the number of {things} of {friend}?",
}


def _numbers(sign: str, rng: np.random.Generator) -> tuple[int, int]:
    if sign == "*":
        return int(rng.integers(2, 10)), int(rng.integers(2, 6))
    low, high = sorted((int(rng.integers(2, 11)), int(rng.integers(2, 11))))
    return (high + low, low) if sign == "-" else (high, low) if rng.integers(2) else (low, high)


def _make(opening: str, event: Event, question: str) -> Callable[[np.random.Generator], Item]:
    def make(rng: np.random.Generator) -> Item:
        person, friend = rng.choice(len(PEOPLE), size=2, replace=False).tolist()
        (name, who), (friend_name, _) = PEOPLE[person], PEOPLE[friend]
        a, b = _numbers(event.sign, rng)
        sentence = " ".join((opening, event.sentence, question))
        words = {"name": name, "who": who, "friend": friend_name, "things": pick(rng, THINGS), "a": a, "b": b}
        value = str(event.operator(a, b))
        return Item(sentence.format(**words) + "\n", f"{a} {event.sign} {b} = {value}\nAnswer: {value}", value)

    return make


def templates() -> list[Template]:
    """Every combination of opening, event and question, in a fixed order."""
    found = []
    for opening_name, opening in OPENINGS.items():
        for event_name, event in EVENTS.items():
            questions = TIMES_QUESTIONS if event.sign == "*" else QUESTIONS
            for question_name, question in questions.items():
                name = f"{opening_name}-{event_name}-{question_name}"
                found.append(Template("word_problems", name, _make(opening, event, question)))
    return found
