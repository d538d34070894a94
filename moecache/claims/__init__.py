"""The claims of the study and the rules that decide them.

A claim is a sentence; its verdict is computed, never typed. The sentence, the rule's name and every number
the rule compares with are data (``data/claims.yml``); the rule is a small pure function from the tidy frame
of one setting (one model, capacity and regime) to a ``Verdict``: a state and the sentence of evidence with
effect, interval and n. A claim measured in several settings is supported only if every one of them supports
it.

``python -m moecache.claims`` prints the page of the book. This package does not know how results were
measured.
"""

from moecache.claims.data import Claim, Drawing, load_claims, stored_frame
from moecache.claims.judge import judge_settings, verdict_on
from moecache.claims.page import page
from moecache.claims.rules import RULES
from moecache.claims.verdict import State, Verdict, combine

__all__ = [
    "RULES",
    "Claim",
    "Drawing",
    "State",
    "Verdict",
    "combine",
    "judge_settings",
    "load_claims",
    "page",
    "stored_frame",
    "verdict_on",
]
