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
#
# What is planned, with its decision rules, was written down [before the run](../decisions/plan_04.md); all else is exploratory.

# %% tags=["parameters"]
model_names = ["reference-512"]  # which reference models read the text
early_model_name = ""  # an earlier age of the first model, to be set beside it; empty leaves it out
num_documents = 7  # held-out documents, domains interleaved
num_tokens = 100  # tokens of each document
num_warmup_documents = 2  # documents read first and not scored
resident_fraction = 0.25  # share of a layer's experts resident at the first capacity
lru_hit_rate = 0.915  # the second capacity is the fewest slots where LRU hits this share of calls
num_slots = 128  # one capacity, slots a layer; 0 takes the two above
third_fraction = 0.0  # share of a layer's experts resident at a third capacity; 0 leaves it out

# %%
from moecache import chapters, figures
from moecache.experiments import frontier, frontier_report, misses_ranks_report, misses_report, misses_that_matter
from moecache.experiments.frontier_report import every_model

reading = frontier.Reading(num_documents, num_tokens, num_warmup_documents)

# %% [markdown]
# ## Measure
#
# MEASURED. The emulator runs the real model with every expert in memory and replaces the router's choice where the rule says so, so losses
# are exact. Every rule reads the same {{num_scored}} documents in the same order after {{num_warmup}} more that only warm the cache (LRU,
# experts 0 to C-1 resident at first, no reset between documents). A stand-in is the best resident outside the token's top-k by router
# logit, with its own routing weight, renormalised as the model does. Intervals are 95 %, by bootstrap over {{num_clusters}} clusters of
# documents that share an origin; *mnat* is a thousandth of a nat.

# %%
settings = {
    "num_documents": num_documents,
    "num_tokens": num_tokens,
    "num_warmup_documents": num_warmup_documents,
    "resident_fraction": resident_fraction,
    "lru_hit_rate": lru_hit_rate,
    "num_slots": num_slots,
}
frames = {model: misses_that_matter.stored(model, **settings) for model in model_names}
tables = {model: misses_report.tables(frame) for model, frame in frames.items()}
capacities = {model: sorted(int(n) for n in frame["num_slots"].unique()) for model, frame in frames.items()}
model, others = model_names[0], model_names[1:]
first, last = capacities[model][0], capacities[model][-1]

# %% [markdown]
# ## Cost of each rule, admitted anyway
#
# {{model}}, {{slots_first}} slots. All rules of a figure meet nearly the same misses; they differ only in which of them they wait for.

# %% tags=["hide-input"]
chapters.show(
    figures.forest(misses_report.setting(tables[model], first, "admitted_anyway")),
    alt=misses_report.describe(tables[model], first, "admitted_anyway"),
)

# %% [markdown]
# {{second_capacity}}

# %% tags=["hide-input"]
if last != first:
    chapters.show(
        figures.forest(misses_report.setting(tables[model], last, "admitted_anyway")),
        alt=misses_report.describe(tables[model], last, "admitted_anyway"),
    )

# %% [markdown]
# {{other_models}}

# %% tags=["hide-input"]
for name in others:
    chapters.show(
        figures.forest(misses_report.setting(tables[name], capacities[name][0], "admitted_anyway")),
        alt=f"{name}. {misses_report.describe(tables[name], capacities[name][0], 'admitted_anyway')}",
    )

# %% [markdown]
# ## The same rules when a substituted expert stays out
#
# Both regimes side by side, one table for each model and capacity. *Calls* are those substituted. *Fetches* are waited for, *copies*
# come in the background and cost link time even when nobody waits for them; both are a step (one token at one layer).

# %% tags=["hide-input"]
for name in model_names:
    for slots in capacities[name]:
        chapters.show_table(misses_report.regime_table(tables[name], slots).rename(columns={"rule": f"{name}, {slots} slots"}), digits=3)

# %% [markdown]
# ## Which rank is substituted
#
# {{slots_first}} slots, admitted anyway. Left: the misses of one rank are substituted, all others are waited for. Right: the first or the
# last ranks are waited for, the others are substituted; at 0 every miss is. A loss that is not above zero has no place on the axis.
# Exploratory, but for the planned comparisons below.

# %% tags=["hide-input"]
ranked = {}
for name in model_names:
    slots = capacities[name][0]
    more = frontier.stored(
        frontier.RANKS, name, frontier.rank_groups(frontier.top_k_of(name)), slots, reading, misses_report.REGIME_OF_RANKS
    )
    ranked[name] = frontier_report.prepare(misses_report.one_setting(frames[name], slots, misses_report.REGIME_OF_RANKS), more)
chapters.show(
    figures.loss_by_rank(every_model(misses_ranks_report.points, ranked)),
    alt=misses_ranks_report.describe(ranked[model]),
)

# %% [markdown]
# One rank at a time. The last column is a rank's share of the sum over the ranks, not of the loss of substituting all at once, which is
# more than the sum.

# %% tags=["hide-input"]
for name in model_names:
    chapters.show_table(misses_ranks_report.alone_table(ranked[name]).rename(columns={"rank": f"rank, {name}"}), digits=2)

# %% [markdown]
# **The share of a few calls** (planned). Split the misses in two, substituted by one rule each: first choices, and all the rest. First
# choices are {{heavy_share_of_calls:.1%}} of the substituted calls of the two and {{heavy_share_of_loss:.1%}} of their loss
# ({{heavy_share_low:.1%}} to {{heavy_share_high:.1%}}). {{heavy_others}}
#
# ## How many, or which?
#
# One point a rule, {{slots_first}} slots, admitted anyway: against how many calls it substitutes, and against their gate mass.
# {{mass_sentence}}

# %% tags=["hide-input"]
chapters.show(
    figures.loss_by_count_and_mass(every_model(misses_report.policy_points, ranked)),
    alt="Perplexity increase of each rule against calls and against gate mass substituted. "
    + misses_report.mass_sentence(frames[model], first),
)

# %% [markdown]
# **Protecting heavy experts against substituting fewer.** Each row substitutes the same number of ranks, once the heaviest and once the
# lightest. *n* is the cluster; dz is the effect size of the paired difference; the last column is the smallest difference that a paired
# test would find in 80 % of samples. The row that waits for half of the ranks is planned, the others are exploratory.

# %% tags=["hide-input"]
for name in model_names:
    chapters.show_table(misses_ranks_report.matched_table(ranked[name]).rename(columns={"without protection": name}), digits=3)

# %% [markdown]
# ## The frontier: who loses least for the same waiting?
#
# Each family of rules has one knob and is a curve of loss against waited-for fetches; {{slots_first}} slots, substituted experts stay
# out, logarithmic axes. *Random misses*: a seeded draw for every call lets a share of the misses wait, whatever they weigh. *True
# contribution* waits where w‖f‖/h is largest: the called expert's own output f times its weight w, against the residual stream h. It
# needs the very expert that is missing, so it is a bound and no rule. Below about 1.1/K a threshold waits for every first choice
# anyway, and protecting them changes nothing. Grey bands mark where the families are compared.

# %% tags=["hide-input"]
fronts = {}
for name in model_names:
    slots = capacities[name][0]
    more = frontier.stored(frontier.FRONTIER, name, frontier.frontier_groups(frontier.top_k_of(name)), slots, reading)
    fronts[name] = frontier_report.prepare(misses_report.one_setting(frames[name], slots, "stays_out"), more)
ratios = {name: frontier_report.ratios(front) for name, front in fronts.items()}
chapters.show(
    figures.miss_rule_frontier(every_model(frontier_report.points, fronts), targets=frontier_report.TARGETS, bound=frontier_report.BOUND),
    alt=frontier_report.describe(ratios),
)

# %% [markdown]
# Loss over that of a plain threshold at the same number of fetches (planned: below 1 the family *beats* the threshold, above 1 it
# *loses*). Curves are interpolated in logarithms; every bootstrap draw of clusters moves loss and fetches of all points. The
# threshold itself loses, in mnat a token: {{threshold_losses}}. The smallest deviation from 1 that this sample would show is
# {{detectable_ratios}}.

# %% tags=["hide-input"]
for name in model_names:
    chapters.show_table(frontier_report.ratio_table(ratios[name]).rename(columns={frontier_report.FIRST_COLUMN: name}))

# %% [markdown]
# The same at a matched number of *substitutions*, in percent of all calls (exploratory): what is substituted then counts, not how many.

# %% tags=["hide-input"]
axis, places = "substituted_share", frontier_report.SUBSTITUTED_TARGETS
for name in model_names:
    matched = frontier_report.ratios(fronts[name], axis, places)
    chapters.show_table(frontier_report.ratio_table(matched, axis).rename(columns={frontier_report.FIRST_COLUMN: name}))

# %% [markdown]
# Admitted anyway, the families at hand are few (exploratory); every rule then also moves the other misses in the background.

# %% tags=["hide-input"]
for name in model_names:
    anyway = frontier_report.ratios(ranked[name])
    chapters.show_table(frontier_report.ratio_table(anyway).rename(columns={frontier_report.FIRST_COLUMN: name}))

# %% [markdown]
# ## Controls: is the best resident worth choosing?
#
# {{slots_first}} slots, admitted anyway. A random resident stands in, or nobody does: the call is dropped, and the other weights stay as
# they are or grow to the old sum. Exploratory.

# %% tags=["hide-input"]
for name in model_names:
    slots = capacities[name][0]
    more = frontier.stored(
        frontier.CONTROLS, name, frontier.control_groups(frontier.top_k_of(name)), slots, reading, misses_report.REGIME_OF_RANKS
    )
    controls = frontier_report.prepare(misses_report.one_setting(frames[name], slots, misses_report.REGIME_OF_RANKS), more)
    chapters.show_table(misses_ranks_report.controls_table(controls).rename(columns={"rule": name}), digits=3)

# %% [markdown]
# ## Fewer slots, and a younger model
#
# {{third_capacity}}

# %% tags=["hide-input"]
if third_fraction:
    for name in model_names:
        slots = frontier.slots_of(name, third_fraction)
        few = frontier.few_groups(frontier.top_k_of(name))
        columns = {
            f"{regime.replace('_', ' ')}, %": frontier.stored(frontier.HALF_CAPACITY, name, few, slots, reading, regime)
            for regime in ("admitted_anyway", "stays_out")
        }
        table = misses_ranks_report.increases_side_by_side(columns)
        chapters.show_table(table.rename(columns={"rule": f"{name}, {slots} slots"}))

# %% [markdown]
# {{two_ages}}

# %% tags=["hide-input"]
if early_model_name:
    few = frontier.few_groups(frontier.top_k_of(early_model_name))
    slots = frontier.slots_of(early_model_name, resident_fraction)
    early = frontier.stored(frontier.TWO_AGES, early_model_name, few, slots, reading, "admitted_anyway")
    older = misses_report.one_setting(frames[model], first, "admitted_anyway")
    older = older[older["policy"].isin(early["policy"].unique())]
    chapters.show_table(misses_ranks_report.increases_side_by_side({f"{early_model_name}, %": early, f"{model}, %": older}))

# %% [markdown]
# ## Test
#
# The unit is the cluster of documents: each rule's loss is paired with the exact model's on the same text. The six comparisons of each
# model are planned, at the first capacity, admitted anyway; paired t-tests, two-sided, corrected by Holm's method over the six, with
# Wilcoxon's test beside them as a check. Policies are a design, not a sample, so there is no p-value over policies.

# %% tags=["hide-input"]
for name in model_names:
    chapters.show_table(misses_report.planned_tests(frames[name], capacities[name][0]).rename(columns={"comparison": name}), digits=3)

# %% [markdown]
# How many times one rule's increase is another's, {{model}} (exploratory):

# %% tags=["hide-input"]
chapters.show_table(misses_report.ratio_rows(frames[model], first), digits=3)

# %%
chapters.values(
    **misses_report.values(frames[model], tables[model], num_warmup_documents, lru_hit_rate),
    **misses_report.words(model_names, capacities, early_model_name, third_fraction),
    **misses_ranks_report.concentration(ranked[model]),
    heavy_others=misses_ranks_report.heavy_others({name: ranked[name] for name in others}),
    threshold_losses=frontier_report.threshold_losses(fronts[model]),
    detectable_ratios=frontier_report.detectable(ratios[model]),
    frontier_sentences=frontier_report.sentences(ratios),
    bound_sentence=frontier_report.bound_sentence(ratios[model]),
)

# %% [markdown]
# ## What it means
#
# In {{model}} at {{slots_first}} slots, admitted anyway, substituting every miss raises the perplexity by {{all_increase:.1%}} (95 %
# interval {{all_low:.1%}} to {{all_high:.1%}}). Substituting *only first choices*, {{rank0_calls:.1%}} of the calls, costs
# {{rank0_increase:.1%}}; substituting only the calls of the last rank, {{last_calls:.1%}} of the calls, costs {{last_increase:.2%}}. The
# rule that waits for first choices and for gate weights of at least 0.15 still substitutes {{gate015_calls:.1%}} of the calls and costs
# {{gate015_increase:.1%}}: it waits for {{gate015_fetches:.2f}} experts a step.
#
# {{second_result}}
#
# At equal waiting, {{frontier_sentences}} {{bound_sentence}}
#
# ## What it does not mean
#
# The percentages belong to this model, its age and this text, not to the rules: a model trained for longer specialises, and the same rule
# then costs more. What should carry over is the order of the rules and the size of their ratios. Models of at most 14 million
# parameters with one training run each were asked; intervals carry the sampling of texts only. Nothing here says how long a fetch takes
# ([chapter 02](02_capacity_and_eviction.ipynb) counts misses; seconds need a machine). Equal fetches are not equal bytes where
# substituted experts are copied in the background.
