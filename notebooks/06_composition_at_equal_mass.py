# %% [markdown]
# # Is a heavy substitution worse than several light ones of equal mass?
#
# If the gate mass that is substituted decides what a policy costs, it cannot matter how the mass is made up: one call of weight 0.13,
# or two of 0.065. Here both are substituted at the same steps of the same texts, and the losses are compared. This is claim e of [the
# claims](../claims.md), asked by an experiment and not by comparing policies, which differ in much else.

# %% [markdown]
# ## What we expect, and why
#
# What a substitution adds to the layer's output is the routing weight times the difference of two experts' outputs. If errors of
# different calls point in independent directions, their *squares* add up, so two calls of half the weight would make half the squared
# error. And a router may give its first choices to experts that say more: then a heavy call would cost more still. Against this stands
# the hypothesis that mass alone counts.
#
# The analysis was [fixed before the full run](../decisions/plan_06_07.md), with a minimum of substituted mass, because a comparison of
# two very small effects decides nothing.

# %% tags=["parameters"]
model_names = ["reference-512"]  # reference models that read the texts
num_documents = 9  # held-out documents, domains interleaved
num_tokens = 120  # tokens of each document
num_warmup_documents = 2  # documents read just before the scored ones, which only set the slots
documents_per_block = 25  # documents measured and stored together
resident_fraction = 0.25  # share of a layer's experts that has slots
most_steps_fraction = 0.25  # sites are at most this share of the steps of each document and layer
gap = 3  # light calls have ranks at least this far below the heavy one
tolerance = 0.04  # the light calls' summed weight differs by at most this fraction from the heavy one's
seed = 0  # of the drawn steps and of random stand-ins

# %%
from moecache import chapters, claims
from moecache.experiments import composition, composition_report
from moecache.figures.composition import heavy_and_light

# %% [markdown]
# ## Measure
#
# At a step (one token at one layer) take the call of rank h. Of all sets of at least two calls of ranks h + {{gap}} and lower whose
# gate weights sum to within {{tolerance:.0%}} of its weight, take the one with the most calls. One pass substitutes the heavy calls,
# another the light sets, at the same steps: at most {{most_steps_fraction:.0%}} of those of each document and layer. Tokens, layers and
# mass are then the same at every single site.
#
# The named calls are substituted whether they are resident or not; the slots ({{resident_fraction:.0%}} of the experts) follow the
# router as if every miss were waited for, so no site disturbs another's stand-ins. Three stand-ins: the best resident outside the
# top-k, a random one, and nobody. {{num_scored}} documents in {{num_clusters}} clusters are scored.

# %%
frame = composition.stored(
    model_names,
    num_documents,
    num_tokens,
    num_warmup_documents,
    documents_per_block,
    resident_fraction=resident_fraction,
    most_steps_fraction=most_steps_fraction,
    gap=gap,
    tolerance=tolerance,
    seed=seed,
)
table = composition_report.tables(frame)

# %% [markdown]
# ## One heavy call against light calls of the same weight
#
# MEASURED. Loss over the exact model on the same tokens, by heavy rank and by who stands in. The number is how many times as much the
# heavy side costs (absent where the light side is not clear of zero).

# %% tags=["hide-input"]
chapters.show(heavy_and_light(table), alt=composition_report.describe(table))

# %% [markdown]
# The same in numbers, `{{first_model}}`. *Mass* is what the heavy side substituted (mean a step); losses in thousandths of a nat a
# token (mnat) with 95 % intervals (clusters drawn); dz is the paired effect size over clusters. The decision rule: both sides
# substitute at least {{least_mass:.2f}} of mass a step and differ by at most 2 %; the interval of heavy minus light lies above 0 and
# that of heavy minus {{factor:g}} times light as well.

# %% tags=["hide-input"]
chapters.show_table(composition_report.shown(table, model_names[0]), digits=3)

# %% tags=["hide-input"]
if len(model_names) > 1:
    chapters.show_table(composition_report.shown(table, model_names[1]), digits=3)

# %% [markdown]
# ## Test
#
# Planned, unit: cluster of documents of one origin. Heavy minus light with the best resident, mnat a token; rank {{primary_rank}} is
# primary, the other two are secondary; p-values of a model are corrected together (Holm). *Smallest detectable*: the difference found
# in 80 % of samples. The controls and everything else on this page are exploratory. `{{first_model}}`:

# %% tags=["hide-input"]
chapters.show_table(composition_report.planned(frame, model_names[0]), digits=4)

# %% tags=["hide-input"]
if len(model_names) > 1:
    chapters.show_table(composition_report.planned(frame, model_names[1]), digits=4)

# %%
verdict = claims.verdict_on("e", frame)
chapters.values(
    **composition_report.values(frame, table),
    first_model=model_names[0],
    primary_rank=composition.HEAVY_RANKS[0],
    gap=gap,
    tolerance=tolerance,
    most_steps_fraction=most_steps_fraction,
    resident_fraction=resident_fraction,
    verdict=str(verdict.state),
    verdict_evidence=verdict.evidence,
)

# %% [markdown]
# ## What it means
#
# {{words}}
#
# With the best resident, {{num_decided}} of {{num_judged}} comparisons (three ranks, {{num_models}} models) are decided for *heavy
# costs more*; {{controls_words}}. Verdict on claim e: **{{verdict}}** ({{verdict_evidence}}).
#
# ## What it does not mean
#
# The calls are named by the experiment, resident or not; a policy substitutes misses only, and what it misses depends on its past. A
# heavy call differs from light ones in two ways, in weight and in rank: which of the two counts is asked in [chapter
# 07](07_rank_or_weight.ipynb). Several light errors may also cancel or add within a step; this is part of the comparison and not taken
# apart. Small models with one training run each were asked; intervals carry the sampling of texts only.
