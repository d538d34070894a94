"""Tasks: answers are right, held-out templates are unseen, generated texts have the committed hashes."""

import ast
import hashlib
import re

import numpy as np
import pytest

from moecache.reference import answers, interpreter_lines, tasks, texts, word_problems

GENERATORS = (word_problems, interpreter_lines)


@pytest.mark.parametrize("generator", GENERATORS)
def test_held_out_templates_are_a_minority_of_many_and_share_no_item_with_training(generator):
    templates = generator.templates()
    held_out = [t for t in templates if t.is_held_out]
    assert len({t.name for t in templates}) == len(templates)
    assert len(templates) / 12 < len(held_out) < len(templates) / 4
    assert len(held_out) >= 12
    training = [t for t in templates if not t.is_held_out]
    seen = {item.text for d in tasks.documents(training, 1500, 1) for item in d.items}
    asked = {item.text for d in tasks.documents(held_out, 300, 2) for item in d.items}
    assert not seen & asked


@pytest.mark.parametrize("generator", GENERATORS)
def test_every_part_of_a_held_out_template_occurs_in_training(generator):
    templates = generator.templates()
    parts = {(i, part) for t in templates if not t.is_held_out for i, part in enumerate(t.name.split("-"))}
    assert all((i, part) in parts for t in templates for i, part in enumerate(t.name.split("-")))


def test_word_problems_add_up():
    for document in tasks.documents(word_problems.templates(), 200, 3):
        for item in document.items:
            a, b = map(int, re.findall(r"\d+", item.question))
            step, answer = item.solution.split("\n")
            assert answer == f"Answer: {item.answer}"
            expected = {"+": a + b, "-": a - b, "*": a * b}[step.split()[1]]
            assert int(item.answer) == expected > 0
            assert step == f"{a} {step.split()[1]} {b} = {expected}"


def test_interpreter_lines_print_what_python_prints():
    allowed = {"__builtins__": {}, "sorted": sorted, "len": len, "max": max, "min": min, "str": str, "sum": sum}
    for document in tasks.documents(interpreter_lines.templates(), 400, 3):
        for item in document.items:
            *assignments, expression = [line.removeprefix(">>> ") for line in item.question.strip().split("\n")]
            names = dict(allowed)
            for name, _, value in (line.partition(" = ") for line in assignments):
                names[name] = ast.literal_eval(value)
            assert repr(eval(expression, names)) == item.solution == item.answer


def test_the_same_seed_gives_the_same_documents_and_another_seed_others():
    templates = word_problems.templates()
    first, again, other = ([d.text for d in tasks.documents(templates, 5, seed)] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_document_holds_no_item_twice():
    for document in tasks.documents(interpreter_lines.templates(), 200, 5, 60):
        assert len({item.text for item in document.items}) == len(document.items)


@pytest.mark.parametrize("domain", texts.TASK_MODULES)
def test_generated_texts_have_the_hashes_of_the_manifest(domain, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "cache_folder", lambda: tmp_path)
    loaded = texts.load_texts(domain, "held_out")
    assert len(loaded) == texts.NUM_HELD_OUT_TASK_DOCUMENTS
    raw = (texts.texts_folder() / f"{domain}.held_out.jsonl").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == texts.load_manifest()["files"][f"{domain}.held_out.jsonl"]["sha256"]
    (texts.texts_folder() / f"{domain}.held_out.jsonl").write_bytes(raw[:-1])
    with pytest.raises(texts.TextsError, match=r"delete the file"):
        texts.load_texts(domain, "held_out")


@pytest.mark.parametrize("domain", texts.TASK_MODULES)
def test_a_questions_own_solution_counts_as_right_and_another_value_does_not(domain):
    questions = answers.held_out_questions(domain, 20)
    assert len({q.template for q in questions}) > 10
    for question in questions:
        mark = "1 + 1 = 2\nAnswer: " if domain == "word_problems" else ""
        assert answers.is_right(question, f"{mark}{question.answer}\n\nmore")
        assert not answers.is_right(question, f"{mark}{question.answer}0\n\n")
        assert not answers.is_right(question, "")
        assert question.prompt.count("\n\n") == 3


def test_accuracy_is_the_share_of_right_answers():
    questions = answers.held_out_questions("interpreter", 10)
    right = iter([q.answer for q in questions[:4]] + ["wrong"] * 6)
    assert answers.accuracy(questions, lambda ids: next(right), lambda text: []) == pytest.approx(0.4)


def test_domains_without_tasks_are_refused():
    with pytest.raises(ValueError, match=r"scripture.*word_problems"):
        answers.held_out_questions("scripture", 3)


def test_numbers_stay_small():
    rng = np.random.default_rng(0)
    values = [int(t.make(rng).answer) for t in word_problems.templates() for _ in range(5)]
    assert max(values) <= 45
