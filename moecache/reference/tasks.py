"""Two seeded generators of tasks whose answers can be checked: word problems and interpreter lines.

A task is an item with a question and one right answer, computed when the item is made by Python's own operators.
An item comes from a template, a combination of parts: an opening, an event and a question for a word problem
(`word_problems`), an operation and a way of writing its operand for an interpreter line (`interpreter_lines`). One
template in `HELD_OUT_ONE_IN` is held out as a whole. Every part occurs in training in other combinations, so a held-out
item asks for recombining what was learnt, never for a part that was not seen.

A document holds items of one template, as `Item.text`, an empty line between two. Numbers are small: a model that
learnt from a few million tokens must be able to solve at least half of the items, else accuracy under a policy would
compare nothing with nothing.

This module knows strings and seeds. It knows no tokenizer and no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

HELD_OUT_ONE_IN = 7
ITEMS_PER_DOCUMENT = 8


@dataclass(frozen=True)
class Item:
    """One task: `question` is the prompt, `solution` what follows it, `answer` the part that is checked."""

    question: str
    solution: str
    answer: str

    @property
    def text(self) -> str:
        """Question and solution as they stand in a document."""
        return self.question + self.solution


@dataclass(frozen=True)
class Template:
    """A named way of making items; `make(rng)` draws one."""

    domain: str
    name: str
    make: Callable[[np.random.Generator], Item]

    @property
    def is_held_out(self) -> bool:
        """True for the templates no training document uses; a property of the name alone."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class TaskDocument:
    """Items of one template; `text` is what the model reads."""

    template: str
    items: tuple[Item, ...]

    @property
    def text(self) -> str:
        """All items, an empty line after each."""
        return "".join(item.text + "\n\n" for item in self.items)


def documents(
    templates: list[Template], num_documents: int, seed: int, items_per_document: int = ITEMS_PER_DOCUMENT
) -> Iterator[TaskDocument]:
    """Yield documents, templates in seeded turns; no item occurs twice within a document.

    Parameters
    ----------
    templates : the templates to use, each about equally often.
    num_documents : how many documents.
    seed : the same seed gives the same documents on every machine.
    items_per_document : most items a document holds.
    """
    rng = np.random.default_rng(seed)
    order: list[int] = []
    for _ in range(num_documents):
        order = order or rng.permutation(len(templates)).tolist()
        template = templates[order.pop()]
        items = {item.text: item for item in (template.make(rng) for _ in range(items_per_document))}
        yield TaskDocument(template.name, tuple(items.values()))


def pick(rng: np.random.Generator, choices: list[str] | tuple[str, ...]) -> str:
    """One of the strings, each equally likely."""
    return choices[int(rng.integers(len(choices)))]
