"""Problems with an answer that can be checked: the generated ones, and files of GSM8K or HumanEval.

A problem is a prompt, a rule by which an answer ends, and a rule by which it is right. Four kinds are known:

- `word_problems` and `interpreter`: held-out templates of the generated tasks (`moecache.reference.answers`);
- `gsm8k`: JSON lines with `question` and `answer` (K. Cobbe et al., arXiv 2110.14168). The first problems of the file are shown solved;
  the answer is the last number that is written, the right one stands after `####`;
- `humaneval`: JSON lines with `prompt`, `test` and `entry_point` (M. Chen et al., arXiv 2107.03374). The answer continues a function and
  is right when the file's own test passes; it is run by `code_answers`, in another process.

This module knows texts. It knows neither models nor policies.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moecache.experiments.code_answers import passes
from moecache.reference.answers import extract_answer, held_out_questions

TASKS = ("word_problems", "interpreter")
NUM_EXAMPLES = 4  # solved problems before a question of GSM8K
_ENDS = {
    "word_problems": ("\n\n",),
    "interpreter": ("\n\n",),
    "gsm8k": ("\n\n", "\nQuestion:"),
    "humaneval": ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert "),
}
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes
    ----------
    kind : one of `_ENDS`.
    name : unlike that of any other problem of the kind.
    template : what it has in common with others; its own name where that is nothing.
    prompt : what the model reads.
    answer : the right value; for `humaneval` the test, as a program to be appended.
    """

    kind: str
    name: str
    template: str
    prompt: str
    answer: str


def generated(kind: str, num_problems: int) -> list[Problem]:
    """Problems of held-out templates, the templates in turns, each after three solved ones.

    Raises
    ------
    ValueError : unknown kind.
    """
    questions = held_out_questions(kind, num_problems)
    return [Problem(kind, f"{kind} {i}", q.template, q.prompt, q.answer) for i, q in enumerate(questions)]


def in_turns(kinds: Sequence[str], num_problems: int) -> list[Problem]:
    """Generated problems of several kinds, one of each kind in turn."""
    return [problem for together in zip(*(generated(kind, num_problems) for kind in kinds), strict=True) for problem in together]


def read_problems(path: str | Path, num_problems: int) -> list[Problem]:
    """The first problems of a GSM8K or HumanEval file (JSON lines, plain or gzipped).

    Raises
    ------
    ValueError : no such file, fewer problems than asked for, or lines of neither form.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no file {path}: give the path of a GSM8K or HumanEval file of JSON lines (.jsonl or .jsonl.gz)")
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        rows = [json.loads(line) for line in file if line.strip()]
    if rows and {"question", "answer"} <= set(rows[0]):
        found = _gsm8k(rows)
    elif rows and {"prompt", "test", "entry_point"} <= set(rows[0]):
        found = [_humaneval(row) for row in rows]
    else:
        raise ValueError(f"{path} holds neither GSM8K (question, answer) nor HumanEval (prompt, test, entry_point) as JSON lines")
    if not 0 < num_problems <= len(found):
        raise ValueError(f"num_problems={num_problems}: {path.name} has 1 to {len(found)} problems")
    return found[:num_problems]


def _gsm8k(rows: list[dict[str, Any]]) -> list[Problem]:
    examples = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in rows[:NUM_EXAMPLES])
    return [
        Problem("gsm8k", f"gsm8k {i}", f"gsm8k {i}", f"{examples}Question: {row['question']}\nAnswer:", row["answer"].partition("####")[2])
        for i, row in enumerate(rows[NUM_EXAMPLES:], NUM_EXAMPLES)
    ]


def _humaneval(row: dict[str, Any]) -> Problem:
    name = str(row.get("task_id", row["entry_point"]))
    return Problem("humaneval", name, name, row["prompt"], f"{row['test']}\ncheck({row['entry_point']})\n")


def has_ended(kind: str, written: str) -> bool:
    """Whether the text that was written holds a mark that ends an answer of this kind."""
    return any(end in written for end in _ENDS[kind])


def is_right(problem: Problem, written: str) -> bool:
    """Whether what a model wrote solves the problem; of `humaneval` this runs it, in a process of its own."""
    answer = _before_end(problem.kind, written)
    if problem.kind == "humaneval":
        return passes(f"{problem.prompt}{answer}\n{problem.answer}")
    if problem.kind == "gsm8k":
        return _last_number(answer) == _last_number(problem.answer) != ""
    return extract_answer(problem.kind, written) == problem.answer


def _before_end(kind: str, written: str) -> str:
    """What was written up to the first mark that ends it."""
    return written[: min((place for end in _ENDS[kind] if (place := written.find(end)) >= 0), default=len(written))]


def _last_number(text: str) -> str:
    """The last number of a text, written plainly; "" where there is none."""
    found = _NUMBER.findall(text)
    return f"{float(found[-1].replace(',', '')):g}" if found else ""
