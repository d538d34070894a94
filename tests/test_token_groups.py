"""Groups of tokens: domains, cold and warm, distance from a change of topic, means by document and domain."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from moecache.token_groups import change_bins, document_frame, domain_frame, with_groups

LENGTHS = (3, 2, 4, 2)


def frame():
    document = np.repeat(np.arange(4), LENGTHS)
    loss = np.arange(11.0)
    loss[[0, 3, 5, 9]] = np.nan  # a document's first token
    return pd.DataFrame({"token": np.arange(11), "document": document, "loss_nats": loss, "hits": np.arange(11) % 2})


def test_tokens_since_the_last_change_of_domain():
    grouped = with_groups(frame(), ["a", "a", "b", "a"], cold_tokens=4)
    assert grouped["domain"].tolist() == ["a"] * 5 + ["b"] * 4 + ["a"] * 2
    assert np.isnan(grouped["tokens_since_change"][:5]).all()  # a, then a again: nothing has changed yet
    assert grouped["tokens_since_change"][5:].tolist() == [0, 1, 2, 3, 0, 1]
    assert grouped["is_cold"].tolist() == [True] * 4 + [False] * 7


def test_one_domain_never_changes():
    assert with_groups(frame(), ["a"] * 4)["tokens_since_change"].isna().all()


def test_documents_and_domains_have_means():
    grouped = with_groups(frame(), ["a", "a", "b", "a"], cold_tokens=4)
    documents = document_frame(grouped)
    assert documents["loss_nats"].tolist() == [1.5, 4.0, 7.0, 10.0]
    assert documents["tokens"].tolist() == list(LENGTHS)
    assert documents["domain"].tolist() == ["a", "a", "b", "a"]
    warm = document_frame(grouped, is_warm_only=True)
    assert warm["document"].tolist() == [1, 2, 3]
    assert warm["tokens"].tolist() == [1, 4, 2]
    domains = domain_frame(grouped)
    assert domains["documents"].tolist() == [3, 1]
    assert domains["loss_nats"].tolist() == [pytest.approx(15.5 / 3), 7.0]


def test_bins_of_distance():
    bins = change_bins([0, 15, 16, 47, 111, 112, 240, 9000, np.nan])
    assert list(bins[:-1]) == ["0-16", "0-16", "16-48", "16-48", "48-112", "112-240", "240+", "240+"]
    assert pd.isna(bins[-1])


def test_a_wrong_number_of_domains_is_refused():
    with pytest.raises(ValueError, match="domains names 2 documents, but the frame has 4"):
        with_groups(frame(), ["a", "b"])
