"""Statistics of paired losses: what a policy costs, how sure that is, and what could not have been seen.

Every policy reads the same documents, so a policy's cost is a paired difference of token losses: its loss of
a document minus the loss of fetching every miss on that document. The unit of every interval and every test
is therefore the document, or the cluster of documents that share an origin; never the token, because the
tokens of a text are not independent. Policies are a design, not a sample: nothing here gives a p-value over
policies.

Tables of several policies or comparisons:

- ``pair_documents`` checks that all policies read the same documents and sums their differences by unit.
- ``perplexity_increases``, ``policy_table``, ``call_shares``, ``ratios_of_increases`` describe policies.
- ``paired_tests``, ``equivalence_tests`` and ``smallest_detectable`` test planned comparisons.
- ``correlation_across_policies``, ``leaving_families_out`` and ``correlation_across_documents`` relate two
  quantities.
- ``fan_within`` and ``fan_across`` say what smaller samples would have shown; ``near_pairs`` lists policies that
  hardly differ in one quantity.

Single questions, answered by rows of one form (``rows``: estimate, interval, n and what it counts, test, p, effect
size, smallest detectable effect, planned or exploratory):

- ``compare``, ``equivalent``: two policies.
- ``association``, ``better_association``, ``association_within``: two quantities.
- ``loss_ratio_of_near_pairs``: equal mass, equal loss?
- ``slopes_by_level``: policies, documents and interaction apart, by a mixed model or by least squares with errors
  clustered both ways.
- ``holm_family`` corrects rows together, ``shown`` makes them fit a page.

This package knows tidy frames only: it does not know models, traces or the cache, and it draws nothing.
"""

from moecache.stats.associations import association, association_within, better_association, detectable_correlation
from moecache.stats.comparisons import compare, equivalent
from moecache.stats.fans import fan_across, fan_within
from moecache.stats.increases import call_shares, perplexity_increases, policy_table, ratios_of_increases
from moecache.stats.levels import slopes_by_level, split_levels
from moecache.stats.near_pairs import loss_ratio_of_near_pairs, near_pairs
from moecache.stats.paired import PairedUnits, pair_documents, unique_documents
from moecache.stats.planned import equivalence_tests, paired_tests, smallest_detectable
from moecache.stats.relations import (
    correlation_across_documents,
    correlation_across_policies,
    leaving_families_out,
)
from moecache.stats.resample import draw_counts, percentile_interval, weighted_mean_draws
from moecache.stats.rows import holm_family, shown, tidy_row

__all__ = [
    "PairedUnits",
    "association",
    "association_within",
    "better_association",
    "call_shares",
    "compare",
    "correlation_across_documents",
    "correlation_across_policies",
    "detectable_correlation",
    "draw_counts",
    "equivalence_tests",
    "equivalent",
    "fan_across",
    "fan_within",
    "holm_family",
    "leaving_families_out",
    "loss_ratio_of_near_pairs",
    "near_pairs",
    "pair_documents",
    "paired_tests",
    "percentile_interval",
    "perplexity_increases",
    "policy_table",
    "ratios_of_increases",
    "shown",
    "slopes_by_level",
    "smallest_detectable",
    "split_levels",
    "tidy_row",
    "unique_documents",
    "weighted_mean_draws",
]
