"""Statistics of paired losses: what a policy costs, how sure that is, and what could not have been seen.

Every policy reads the same documents, so a policy's cost is a paired difference of token losses: its loss of
a document minus the loss of fetching every miss on that document. The unit of every interval and every test
is therefore the document, or the cluster of documents that share an origin; never the token, because the
tokens of a text are not independent. Policies are a design, not a sample: nothing here gives a p-value over
policies.

- ``pair_documents`` checks that all policies read the same documents and sums their differences by unit.
- ``perplexity_increases``, ``policy_table``, ``call_shares``, ``ratios_of_increases`` describe policies.
- ``paired_tests``, ``equivalence_tests`` and ``smallest_detectable`` test planned comparisons.
- ``correlation_across_policies``, ``leaving_families_out`` and ``correlation_across_documents`` relate two
  quantities.

This package knows tidy frames only: it does not know models, traces or the cache, and it draws nothing.
"""

from moecache.stats.increases import call_shares, perplexity_increases, policy_table, ratios_of_increases
from moecache.stats.paired import PairedUnits, pair_documents, unique_documents
from moecache.stats.planned import equivalence_tests, paired_tests, smallest_detectable
from moecache.stats.relations import (
    correlation_across_documents,
    correlation_across_policies,
    leaving_families_out,
)
from moecache.stats.resample import draw_counts, percentile_interval, weighted_mean_draws

__all__ = [
    "PairedUnits",
    "call_shares",
    "correlation_across_documents",
    "correlation_across_policies",
    "draw_counts",
    "equivalence_tests",
    "leaving_families_out",
    "pair_documents",
    "paired_tests",
    "percentile_interval",
    "perplexity_increases",
    "policy_table",
    "ratios_of_increases",
    "smallest_detectable",
    "unique_documents",
    "weighted_mean_draws",
]
