# %% [markdown]
# # Which misses matter?
#
# A quarter of the experts is resident. A token calls an expert that is not. The miss can be waited for, which is exact, or another
# expert can stand in, which is fast. Here every simple rule for choosing between the two reads the same text, and we ask what each rule
# costs: how much the perplexity rises over waiting for every miss, and what kind of call was substituted to get there.

# %% [markdown]
# ## What we expect, and why
#
# A call's expert output is multiplied by its routing weight, so a heavy call should be missed more than a light one. If that is the main
# effect, then substituting only first choices must cost far more than substituting many light calls, and a rule that waits for
# the few heavy misses must come close to waiting for all of them. If instead only the *number* of substitutions counted, the
# rules would line up by their share of substituted calls.
#
# Two things could blur the comparison, so both are varied. First, how often misses come: {{capacities}}. Second, what becomes of
# a substituted expert. If it *stays out*, a rule that seldom waits starves its own cache and meets more misses than its
# neighbours. If it is *admitted anyway*, it is not waited for but is resident from the next token on; then all rules meet nearly
# the same misses, and the rule alone is compared.

# %% tags=["parameters"]
model_name = "reference-512"  # which reference model reads the text
num_documents = 7  # held-out documents, domains interleaved
num_tokens = 150  # tokens of each document
num_warmup_documents = 2  # documents read first and not scored
resident_fraction = 0.25  # share of a layer's experts resident at the first capacity
lru_hit_rate = 0.915  # the second capacity is the fewest slots where LRU hits this share of calls
num_slots = 0  # one capacity, slots a layer; 0 takes the two above

# %%
from moecache import chapters, figures, results, stats
from moecache.experiments import inputs, misses_report, misses_that_matter

parameters = {
    "model": model_name,
    "num_documents": num_documents,
    "num_tokens": num_tokens,
    "num_warmup_documents": num_warmup_documents,
    "resident_fraction": resident_fraction,
    "lru_hit_rate": lru_hit_rate,
    "num_slots": num_slots,
}

# %% [markdown]
# ## Measure
#
# The emulator runs the real model with every expert in memory and replaces the router's choice where the rule says so, so losses are
# exact. Every rule reads the same {{num_scored}} documents in the same order after {{num_warmup}} more that only warm the cache (LRU,
# experts 0 to C-1 resident at first, no reset between documents). A stand-in is the best resident outside the token's top-k by router
# logit, with its own routing weight, renormalised as the model does.

# %%
measured = results.load_or_run(
    "04_misses_that_matter",
    parameters,
    lambda: misses_that_matter.measure_reference(**parameters),
    inputs=inputs.reference_inputs(model_name),
)
frame = stats.unique_documents(measured.frame)
capacities = sorted(frame["num_slots"].unique())
table = misses_report.tables(frame)

# %% [markdown]
# ## Cost of each rule, admitted anyway
#
# All rules of a figure meet nearly the same misses; they differ only in which of them they wait for.

# %% tags=["hide-input"]
first, last = capacities[0], capacities[-1]
chapters.show(
    figures.forest(misses_report.setting(table, first, "admitted_anyway")),
    alt=misses_report.describe(table, first, "admitted_anyway"),
)

# %% [markdown]
# {{second_capacity}}

# %% tags=["hide-input"]
if last != first:
    chapters.show(
        figures.forest(misses_report.setting(table, last, "admitted_anyway")),
        alt=misses_report.describe(table, last, "admitted_anyway"),
    )

# %% [markdown]
# ## The same rules when a substituted expert stays out

# %% tags=["hide-input"]
chapters.show(
    figures.forest(misses_report.setting(table, first, "stays_out")),
    alt=misses_report.describe(table, first, "stays_out"),
)

# %% [markdown]
# Both regimes side by side, at {{slots_first}} slots. *Calls* are those substituted. *Fetches* are waited for, *copies* come in the
# background and cost link time even when nobody waits for them; both are a step (one token at one layer).

# %% tags=["hide-input"]
chapters.show_table(misses_report.regime_table(table, first), digits=3)

# %% [markdown]
# {{second_capacity}}

# %% tags=["hide-input"]
if last != first:
    chapters.show_table(misses_report.regime_table(table, last), digits=3)

# %% [markdown]
# ## Does substituted mass predict the cost?
#
# One point a rule, at the first capacity, substituted experts staying out. Open points are rules that substitute first choices.

# %% tags=["hide-input"]
chapters.show(
    figures.increase_by_mass(misses_report.setting(table, first, "stays_out")),
    alt="Perplexity increase against substituted gate mass, one point for each rule. " + misses_report.mass_sentence(frame, first),
)

# %% [markdown]
# ## Test
#
# The unit is the document: each rule's loss is paired with the exact model's on the same document. The comparisons below were fixed
# before the full run was made, but after small pilot runs on a few documents: call them planned for the full run, and not blind. Their
# p-values are corrected for their number (Holm).
# All other comparisons on this page are exploratory. Policies are a design, not a sample, so there is no p-value over policies.

# %% tags=["hide-input"]
planned = stats.paired_tests(
    misses_report.one_setting(frame, first, "admitted_anyway"),
    misses_report.planned_pairs(frame),
)
chapters.show_table(planned, digits=4)

# %% [markdown]
# How many times one rule's increase is another's (interval by bootstrap over documents):

# %% tags=["hide-input"]
ratios = stats.ratios_of_increases(
    misses_report.one_setting(frame, first, "admitted_anyway"),
    misses_report.planned_ratios(frame),
)
chapters.show_table(ratios.drop(columns=["note"]), digits=3)

# %%
chapters.values(**misses_report.values(frame, table, num_warmup_documents, lru_hit_rate))

# %% [markdown]
# ## What it means
#
# At {{slots_first}} slots, admitted anyway, substituting every miss raises the perplexity by {{all_increase:.1%}} (95 % interval
# {{all_low:.1%}} to {{all_high:.1%}}). Substituting *only first choices*, {{rank0_calls:.1%}} of the calls, costs {{rank0_increase:.1%}};
# substituting only the calls of the last rank, {{last_calls:.1%}} of the calls, costs {{last_increase:.2%}}. The rule that waits
# for first choices and for gate weights of at least 0.15 still substitutes {{gate015_calls:.1%}} of the calls and costs
# {{gate015_increase:.1%}}: it waits for {{gate015_fetches:.2f}} experts a step.
#
# {{second_result}}
#
# ## What it does not mean
#
# The percentages belong to this model, its age and this text, not to the rules: a model trained for longer specialises, and the same rule
# then costs more. What should carry over is the order of the rules and the size of their ratios. One small model with one training seed
# was asked; intervals carry the sampling of documents only. Nothing here says how long a fetch takes
# ([chapter 02](02_capacity_and_eviction.ipynb) counts misses; seconds need a machine).
