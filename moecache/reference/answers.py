"""Does the model solve the held-out tasks? Greedy decoding, answers compared as strings of values.

A prompt holds a few solved items of the same held-out template and then the question of a new one, as a document does.
The model writes greedily until an empty line. The answer is what stands after `Answer:` in a word problem and the whole
line in the interpreter; it is right when it equals the value computed when the item was made. Nothing the model writes
is executed.

This module knows prompts and answers. How a next token is chosen is the caller's `generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moecache.reference.tasks import Template, documents
from moecache.reference.texts import TASK_MODULES

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

QUESTION_SEED = 99
MAX_NEW_TOKENS = 48
Generate = Callable[[list[int]], str]


@dataclass(frozen=True)
class Question:
    """A prompt and the right answer."""

    domain: str
    template: str
    prompt: str
    answer: str


def held_out_questions(domain: str, num_questions: int, num_examples: int = 3) -> list[Question]:
    """Questions of held-out templates, the templates in turns, each after `num_examples` solved items.

    Raises
    ------
    ValueError : unknown domain; lists the right ones.
    """
    if domain not in TASK_MODULES:
        raise ValueError(f"domain {domain!r} has no tasks; choose one of {tuple(TASK_MODULES)}")
    templates: list[Template] = [t for t in TASK_MODULES[domain].templates() if t.is_held_out]
    found = []
    for document in documents(templates, num_questions, QUESTION_SEED, 4 * (num_examples + 1)):
        *examples, last = document.items[: num_examples + 1]
        prompt = "".join(item.text + "\n\n" for item in examples) + last.question
        found.append(Question(domain, document.template, prompt, last.answer))
    return found


def extract_answer(domain: str, written: str) -> str:
    """The value in what a model wrote: after `Answer:` up to the line's end, or the first line."""
    if domain == "word_problems":
        _, mark, written = written.partition("Answer:")
        if not mark:
            return ""
    return written.strip().partition("\n")[0].strip()


def is_right(question: Question, written: str) -> bool:
    """Whether what a model wrote holds the question's answer."""
    return extract_answer(question.domain, written) == question.answer


def accuracy(questions: Sequence[Question], generate: Generate, encode: Callable[[str], list[int]]) -> float:
    """Share of right answers, 0 to 1."""
    return float(np.mean([is_right(question, generate(encode(question.prompt))) for question in questions]))


def greedy(model: PreTrainedModel, tokenizer: Tokenizer, max_new_tokens: int = MAX_NEW_TOKENS) -> Generate:
    """Greedy decoding with the model's own cache, until an empty line, the end mark or `max_new_tokens`."""

    @torch.no_grad()
    def generate(prompt_ids: list[int]) -> str:
        ids: Tensor = torch.tensor([[0, *prompt_ids]])
        cache, written = None, []
        for _ in range(max_new_tokens):
            output = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
            cache = output.cache
            token = int(output.logits[0, -1].argmax())
            written.append(token)
            if token == 0 or "\n\n" in tokenizer.decode(written):
                break
            ids = torch.tensor([[token]])
        return tokenizer.decode(written)

    return generate
