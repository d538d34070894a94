# %% [markdown]
# # Does substituted mass set the loss?
#
# Each substituted call has a gate weight; the sum over a step is its *substituted gate mass*. If mass were what quality is paid in, one
# number from the router's scores would tell what a policy costs, and nobody would need to run the model. Here {{num_policies}} policies of
# {{num_families}} families read the same text, and mass has to order their losses, and to equal them where it is equal.

# %% [markdown]
# ## What we expect, and why
#
# An expert's output is multiplied by its routing weight, so mass should be roughly right: more mass, more loss. It cannot be wholly
# right if damage is convex. The error that a substitution leaves in the layer is a vector of about the weight's length, and what counts is
# its size against the residual stream; then one heavy call costs more than three light ones of the same mass. Three other descriptions
# stand beside mass: the sum of *squared* weights, the same with the *age* of the call (tokens since its expert was last called), and the
# *relative layer error* e², which knows the experts' outputs and not only their weights.
#
# What is planned, with its decision rules, was written down [before the run](../decisions/plan_05.md).

# %% tags=["parameters"]
model_names = ["reference-512"]  # which reference models read the text
num_documents = 7  # held-out documents, domains interleaved
num_tokens = 120  # tokens of each document
num_warmup_documents = 2  # documents read first and not scored
resident_fraction = 0.25  # share of a layer's experts that is resident

# %%
import pandas as pd

from moecache import chapters, claims, figures
from moecache.experiments import mass_hypothesis
from moecache.experiments import mass_hypothesis_report as report
from moecache.experiments.ages_report import ages_words

# %% [markdown]
# ## Measure
#
# MEASURED. The emulator runs the real model with every expert in memory and replaces the router's choice where the policy says so, so
# losses and layer errors are exact. Setting: {{num_slots}} slots a layer ({{model}}), LRU, a substituted miss stays out, the best resident
# stands in with its own weight. Each policy reads the same {{num_documents}} documents after {{num_warmup}} that only warm the cache.

# %%
frame = report.prepare(mass_hypothesis.rows(model_names, resident_fraction, num_documents, num_tokens, num_warmup_documents))
listed = {model: report.one_model(frame, model) for model in model_names}

# %% [markdown]
# ## Across policies
#
# One point a policy. The unit of all intervals is the cluster of documents of one origin; policies are a fixed list, so there is no
# p-value over policies. Losses span orders of magnitude, so Spearman's coefficient counts and Pearson's only stands beside it.

# %% tags=["hide-input"]
chapters.show(
    figures.loss_by_predictor(report.points(frame, model_names)),
    alt=f"Perplexity increase of each policy against mass, squared weights and layer error. {report.sentence(frame, model_names)}",
)

# %% tags=["hide-input"]
chapters.show_table(report.every_model(report.order_table, listed))

# %% [markdown]
# Leaving out one family at a time shows how much the list itself matters:

# %% tags=["hide-input"]
chapters.show_table(report.every_model(report.families_left_out, listed), digits=2)

# %% [markdown]
# ## Equal mass, equal loss?
#
# Pairs of policies whose masses differ by at most 10 %: how many times one loses what the other does. If mass set the loss, the median
# would be near 1; up to 1.25 was to count as support.

# %% tags=["hide-input"]
chapters.show_table(report.every_model(report.ratio_table, listed))

# %% [markdown]
# The pairs that differ most, in the first model:

# %% tags=["hide-input"]
chapters.show_table(report.widest_pairs(listed[model_names[0]]), digits=3)

# %% [markdown]
# ## What predicts better?
#
# The same questions for four predictors. *Minus that of mass*: the difference of two coefficients over the same draws; above zero, the
# predictor orders the policies better (planned for squared weights and e², exploratory for the age). *Loss ratio at equal value*: as above,
# for policies within 10 % of each other in that predictor.

# %% tags=["hide-input"]
chapters.show_table(report.every_model(report.predictors, listed))

# %% [markdown]
# ## Across documents, within a policy
#
# Does the text with more substituted mass lose more? Each policy that substitutes no first choice by itself, and their mean. Points are
# documents; whole clusters are drawn. With {{num_documents}} documents a correlation of {{detectable_r:.2f}} is the smallest that a test
# would find in 80 % of samples.

# %% tags=["hide-input"]
chapters.show_table(report.every_model(report.within_policies, listed))

# %% [markdown]
# What would a smaller study have said? Samples of n documents out of those read; the band holds 95 % of the samples, the number at the
# bottom is the share whose sign is not that of all documents. A coefficient near zero has no sign to find.

# %% tags=["hide-input"]
fans = pd.concat([report.fans(rows).assign(model=model) for model, rows in listed.items()], ignore_index=True)
chapters.show(
    figures.fan(fans),
    alt=f"Spearman's coefficient of mass and loss in samples of growing size. {report.fan_sentence(fans)}",
)

# %% [markdown]
# ## Three levels in one model
#
# Every policy read every document, so a predictor splits into its policy's mean, its document's mean and the rest. A mixed model with
# crossed random intercepts of policy and document gives each its slope (nats a unit, 95 % interval). If the predictor were the cause, the
# slopes would agree. The slope between policies has no p-value: policies are a design. Exploratory.

# %% tags=["hide-input"]
chapters.show_table(report.every_model(report.levels, listed))

# %% [markdown]
# ## With eviction and admission varied
#
# Two rules under other residencies against the same rule under LRU without admission: six planned t-tests a model over clusters of
# documents, corrected by Holm's method. A change in loss opposite to the change in mass speaks against mass as the cause.

# %% tags=["hide-input"]
varied = {model: report.residencies(rows, report.one_model(frame, model, "varied")) for model, rows in listed.items()}
chapters.show_table(report.every_model(report.residency_table, varied), digits=3)

# %%
judged = mass_hypothesis.judged_rows(frame)
verdicts = {f"verdict_{letter}": str(claims.verdict_on(letter, judged).state) for letter in "bcdl"}
chapters.values(num_warmup=num_warmup_documents, **verdicts, **report.values(frame, model_names))
chapters.values(ages=ages_words(["0.15 rule", "first choice"]))

# %% [markdown]
# ## What it means
#
# In {{model}}, over the {{num_protecting}} policies that substitute no first choice, mass orders the losses with Spearman's coefficient
# {{spearman_protecting}}; over the whole list {{spearman_all}}, and e² {{spearman_error}}. Policies within 10 % of each other's mass
# differ in loss by a median factor of {{ratio}}. The strong form, equal mass and equal loss, is {{strong_form}}. In {{num_opposite}} of six
# changes of residency mass and loss clearly move in opposite directions. {{ages}}
#
# Verdicts on [the claims](../claims.md), over the models {{models}}: b (more mass, more loss) {{verdict_b}}; c (mass does not
# say which texts lose) {{verdict_c}}; d (the relation breaks for first choices) {{verdict_d}}; l (conclusions turn as the
# sample grows) {{verdict_l}}. Claim l is to be read with c: where a coefficient is near zero, a turning sign is what sampling
# looks like, not a finding.
#
# ## What it does not mean
#
# The order of {{num_policies}} chosen policies says nothing about policies outside the list. e² ranks miss rules with one fallback and one
# weight rule; a random stand-in or a dropped call makes errors of another kind, which the next layers forgive differently. Models
# of at most 14 million parameters with one training run each were asked; intervals carry the sampling of texts only. Where mass
# says nothing across texts it is not therefore useless: policies are compared on the same text.
