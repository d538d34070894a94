# %% [markdown]
# # What else could the memory buy?
#
# Substitution answers a miss by *another* expert at full precision. The same bytes could hold something else: a copy of *every* expert in
# few bits, so that a miss is answered by the *same* expert, roughly; experts fetched before they are called; or simply all experts in as
# many bits as fit, so that nothing is ever missed. Which of these loses least, in how much memory, and for how many waited-for bytes?

# %% [markdown]
# ## What we expect
#
# Another expert is a poor stand-in for the one that was called, and rounding to two bits is a smaller error than that. So wherever copies
# of all experts fit, they should win. They take a fixed number of bytes, though: a small share of 16-bit experts, a large one of experts
# that are served in 4 bits anyway, and then nothing is left but to substitute or to wait. Prefetching changes no answer: it turns waiting
# into bytes in flight, as far as the next calls can be foretold.
#
# **Planned** before the full run ([the plan of this chapter](../decisions/plan_14.md), [what holds for every
# plan](../decisions/plan_common.md)), for each model: 2-bit copies under the 0.15 rule minus substitution under the gate-weight threshold
# that waits for as many bytes, at 16 bits with 25 % and 50 %, at 8 bits with 50 %, and at 4 bits with 75 %: the cells in which copies of
# all experts fit. Two-sided paired t-tests over clusters, Holm's correction over those that can be carried out. Copies win if the 95 %
# interval lies below 0, substitution if above. Everything else on this page, the map in particular, is exploratory.

# %% tags=["parameters"]
model_names = ["reference-512"]  # reference models
base_bits = [16, 4]  # base precisions, bits a weight
budgets = [0.25, 0.75]  # memory, shares of all experts' bytes at the base precision
num_documents = 6  # held-out documents of the planned comparisons, domains interleaved
num_map_documents = 5  # the first of them, read for everything else
num_tokens = 64  # tokens of each document
num_warmup_documents = 2  # documents read first and not scored
gate_thresholds = [0.15, 0.08]  # the substitution curve, gate weight at ten calls a token
copy_gate_thresholds = []  # further points of copies and prefetch, gate weight at ten calls a token
copy_bits = [2]  # bits of copies
num_prefetches = 4  # experts brought ahead for a step at most

# %%
import pandas as pd

from moecache import chapters, results
from moecache.experiments import inputs, memory_choices, memory_choices_cells
from moecache.experiments import memory_choices_report as report
from moecache.figures import memory_choices as drawn

sweep = {
    "gate_thresholds": gate_thresholds,
    "copy_gate_thresholds": copy_gate_thresholds,
    "copy_bits": copy_bits,
    "num_prefetches": num_prefetches,
}
text = {"num_documents": num_documents, "num_tokens": num_tokens, "num_warmup_documents": num_warmup_documents}
text |= {"num_map_documents": num_map_documents}

# %% [markdown]
# ## Measure
#
# A *cell* is a base precision and a budget. At base 8 or 4 bits every large matrix of the model is rounded first, and that rounded model is
# the exact baseline of the cell: all losses are against it, and copies are rounded from its weights. All bytes count, scales and zeros
# too: the experts are narrow, so that a 2-bit copy takes {{copy_words}}. A layer needs at least as many slots as its router
# calls. LRU; the cache is kept between documents. The emulator computes every answer exactly; fetches of what waits for every miss are
# replayed from the trace of the base model.
#
# What a miss gets when it is not waited for: *substitution*, the best resident outside the top-k; *low-bit copies*, the same expert from
# its copy; *copies of some* (where copies of all do not fit: half the budget in slots, half in copies of the experts called most in the
# warm-up), its copy, and without one it is waited for; *prefetch* brings up to {{num_prefetches}} experts a step that the router named
# one layer earlier, and pays for the blocks in flight with slots. *Everything in few bits* holds all experts at the most bits that fit
# and misses nothing.
#
# One contender is **left out**: a copy where there is one *and a stand-in elsewhere*. A policy has one fallback. Where all copies fit it
# would be the copies themselves.


# %%
def stored(model, bits, budget):
    parameters = {"model": model, "base_bits": int(bits), "budget": float(budget), "sweep": sweep, **text}
    return results.load_or_run(
        "14_memory_choices",
        parameters,
        lambda: memory_choices.measure_reference(**parameters),
        inputs=inputs.reference_inputs(model),
    ).frame


def sizes_of(model):
    parameters = {"model": model, "base_bits": base_bits, "budgets": budgets, "sweep": sweep}
    return results.load_or_run(
        "14_sizes", parameters, lambda: memory_choices_cells.size_rows(**parameters), inputs=inputs.reference_inputs(model)
    ).frame


sizes = {model: sizes_of(model) for model in model_names}
cells = {model: list(rows[["base_bits", "budget"]].drop_duplicates().itertuples(index=False)) for model, rows in sizes.items()}
frame = pd.concat([stored(model, bits, budget) for model in model_names for bits, budget in cells[model]], ignore_index=True)
points = {model: report.all_points(frame, model) for model in model_names}
bands = {model: report.all_bands(frame, model, points[model]) for model in model_names}
tests = {model: report.planned_tests(frame, model) for model in model_names}
asked = [(bits, budget) for bits in base_bits for budget in budgets]
untested = " ".join(report.untested_words(frame, model, asked) for model in model_names)
first = model_names[0]
others = report.others_words(bands, tests, first)
chapters.values(**report.values(frame, points[first], bands[first], first), copy_words=report.copy_words(sizes[first]), untested=untested)
chapters.values(num_warmup=num_warmup_documents, num_prefetches=num_prefetches, test_words=report.test_words(tests[first]), others=others)

# %% [markdown]
# What fits where ({{model}}; slots a layer, *copies of all* with the slots left beside them):

# %% tags=["hide-input"]
chapters.show_table(report.shown_sizes(sizes[first]))

# %% [markdown]
# ## Loss against waited-for bytes
#
# Each panel is a cell; both axes are logarithmic. Lower is better, and further left is faster. Intervals are 95 %, over {{num_clusters}}
# clusters of {{num_scored}} documents after {{num_warmup}} that only warm the cache. Hollow marks: copies in more bits. *Waiting* stands
# where every miss can be waited for: there nothing is lost. {{model}}.

# %% tags=["hide-input"]
chapters.show(
    drawn.loss_by_waited(points[first]),
    alt=f"Loss against waited-for bytes in every cell. When nothing waits, thousandths of a nat: {report.no_wait_words(points[first])}.",
)

# %% [markdown]
# ## Who wins where
#
# For each budget, from bottom to top: the contender with the lowest loss of those that wait for no more than the bytes on the left axis.
# Black marks are the crossings, lines follow one crossing through the budgets. Between measured points curves are straight in logarithms.
# Hatched: the interval does not tell the winner from the next best family. Exploratory; {{model}}.

# %% tags=["hide-input"]
chapters.show(drawn.winner_map(bands[first]), alt=f"Winner by budget and waited-for bytes. {report.band_words(bands[first])}")

# %% [markdown]
# Every policy at {{main_cell}}. *Fetches* are experts waited for in a step, *waited for* and *moved* (background copies and prefetches
# included) thousands of bytes a token over all layers. *Admitted anyway*: the missed expert is resident from the next token on.

# %% tags=["hide-input"]
chapters.show_table(report.shown_points(points[first], *report.main_cell(cells[first])), digits=3)

# %% [markdown]
# ## Test
#
# The unit is the cluster of documents that share an origin: n = {{num_planned_clusters}}. Thousandths of a nat a token; *smallest
# detectable* is the mean difference that this sample would have shown with a power of 80 %; *ratio* is substitution's loss over the
# copies' (a dash where one of them is no loss). Wilcoxon's test stands beside as a check. {{untested}}

# %% tags=["hide-input"]
chapters.show_table(report.shown_tests(pd.concat([rows.assign(model=model) for model, rows in tests.items()])), digits=3)

# %% [markdown]
# ## What it means
#
# {{model}}, planned: {{test_words}}.
#
# Lowest loss by waited-for bytes: {{map_words}} Somewhere in its cell wins: {{wins_words}}.
#
# When nothing at all is waited for, loss in thousandths of a nat: {{no_wait_words}}.
#
# Prefetch loses nothing where every miss is still waited for, and moves more: {{prefetch_words}}.
#
# {{others}}
#
# ## What it does not mean
#
# **None of this is a result about large models.** These models have at most 14 million parameters; how well rounding is borne, and how
# poor a stand-in is, may change with size and training, in either direction. Their experts are narrow, so that scales and zeros weigh more
# beside 2-bit codes than they would in wide experts, which leave more room for copies. Rounding is to the nearest with clipping; better
# methods exist and would favour copies. Bytes are counted, not seconds: unpacking few bits costs time that is not shown here, and a
# prefetch that nobody waits for still uses the link. Intervals carry the sampling of documents, not that of training seeds, and the map
# is the best of several contenders on the same documents, so that its narrow bands are not findings.
