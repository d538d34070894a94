"""The training stream is a function of seed and row; held-out documents are spread over clusters."""

import numpy as np
import pytest

from moecache.reference import held_out
from moecache.reference.corpus import BLOCK_ROWS, Corpus
from moecache.reference.settings import MIXTURE

SHARES = {"a": 0.75, "b": 0.25}


def make_corpus(seed=1):
    streams = {"a": np.arange(0, 1001, dtype=np.uint16), "b": np.arange(5000, 5101, dtype=np.uint16)}
    return Corpus(streams, SHARES, row_tokens=10, seed=seed)


def test_the_mixture_sums_to_one():
    assert sum(MIXTURE.values()) == pytest.approx(1)
    assert MIXTURE["word_problems"] + MIXTURE["interpreter"] >= 0.15


def test_every_block_holds_each_domain_as_often_as_its_share_says():
    corpus = make_corpus()
    for block in range(3):
        rows = [corpus.row(block * BLOCK_ROWS + i) for i in range(BLOCK_ROWS)]
        assert sum(row[0] < 5000 for row in rows) == 75


def test_a_pass_over_a_domain_reads_every_row_once_and_the_next_in_another_order():
    corpus = make_corpus()
    starts = [int(row[0]) for row in (corpus.row(i) for i in range(4 * BLOCK_ROWS)) if row[0] < 5000]
    first, second = starts[:100], starts[100:200]
    assert sorted(first) == sorted(second) == list(range(0, 1000, 10))
    assert first != second


def test_rows_are_consecutive_tokens_with_one_more_as_target():
    row = make_corpus().row(7)
    assert len(row) == 11
    assert (np.diff(row.astype(int)) == 1).all()


def test_a_row_depends_on_its_number_alone():
    corpus, again = make_corpus(), make_corpus()
    later = [again.row(i) for i in (350, 20, 199)]
    for _ in range(3):
        corpus.row(3)
    assert all((corpus.row(i) == row).all() for i, row in zip((350, 20, 199), later, strict=True))
    assert (make_corpus(2).batch(0, 20) != corpus.batch(0, 20)).any()


def test_shares_that_do_not_sum_to_one_and_short_domains_are_refused():
    stream = np.zeros(100, np.uint16)
    with pytest.raises(ValueError, match=r"75 rows of 100"):
        Corpus({"a": stream}, SHARES, 10, 1)
    with pytest.raises(ValueError, match=r"domain a has 100 tokens, a row needs 201"):
        Corpus({"a": stream}, {"a": 1.0}, 200, 1)


def test_each_cluster_gives_its_first_document_before_any_gives_its_second():
    clusters = ["x"] * 6 + ["y"] * 3 + ["z"]
    order = held_out.spread_order(clusters, [1])
    named = [clusters[i] for i in order]
    assert sorted(order) == list(range(10))
    assert set(named[:3]) == {"x", "y", "z"}
    assert sorted(named[3:5]) == ["x", "y"]
    assert order == held_out.spread_order(clusters, [1])
    assert order != held_out.spread_order(clusters, [2])


def test_generated_held_out_documents_need_no_package(tmp_path, monkeypatch):
    monkeypatch.setattr("moecache.reference.texts.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(held_out, "cache_folder", lambda: tmp_path)
    domains = ("word_problems", "interpreter")
    documents = held_out.held_out_documents(24, 200, domains=domains)
    assert [d.domain for d in documents[:4]] == ["word_problems", "interpreter"] * 2
    assert len({d.cluster for d in documents}) >= 20
    assert all(d.tokens.shape == (200,) and d.tokens.dtype == np.int32 and d.tokens[0] == 0 for d in documents)
    shorter = held_out.held_out_documents(6, 200, domains=domains)
    assert [d.name for d in shorter] == [d.name for d in documents[:6]]
    with pytest.raises(ValueError, match=r"num_documents=100000: between 1 and"):
        held_out.held_out_documents(100_000, 200, domains=domains)
