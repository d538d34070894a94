# %% [markdown]
# # Can the loss be predicted from the trace alone?
#
# A simulator replays router scores in milliseconds and knows who is resident, who waits and who is substituted; what a policy costs in
# *quality* takes a run of the model. Here a small formula is fitted once to {{num_fitted}} policies that the emulator ran. Does it then
# tell the loss of policies, capacities, evictions, admissions and documents that it never saw, from router scores alone, and better
# than substituted mass does?

# %% [markdown]
# ## What we expect, and why
#
# What a substituted call does grows faster than its gate weight, and first choices weigh more than their weight says
# ([chapter 05](05_the_mass_hypothesis.ipynb), [chapter 07](07_rank_or_weight.ipynb)). So
#
# $$\text{loss} = \Big(\sum_{\text{layer}, \text{rank group}} a \cdot \text{squared substituted weights} \cdot \text{age}^{\,g}\Big)^{s}$$
#
# with rank groups {0}, {1}, {2, 3}, {4 and up}; *age* is the number of tokens since the missed call's expert was last called. All of it
# can be read off router scores and a decision log. We expect it to order policies well and to be out by a factor of less than 1.5; under
# another eviction or with admission less well, because other calls are missed there.
#
# What is planned, with its decision rules, was written down [before the run](../decisions/plan_13.md).

# %% tags=["parameters"]
model_names = ["reference-512"]  # which reference models read the text
num_documents = 14  # held-out documents, domains interleaved
num_tokens = 60  # tokens of each document
num_warmup_documents = 2  # documents read first and not scored
resident_fraction = 0.25  # share of a layer's experts that is resident where the formula is fitted; judged at half and twice that too
num_rules = 2  # judged rules at other capacities and residencies, 7 at most
num_draws = 50  # bootstrap draws of each fit
num_policies = 24  # policies in the front's sweep
num_sweep_documents = 6  # documents that the sweep replays, warm-up included
num_best = 2  # policies that the estimate calls best and the emulator is asked about
hardware = "pcie4"  # machine whose seconds are simulated
expert_mebibytes = 6.0  # size of an expert there
scaled_layers = 48  # MoE layers that seconds a token are scaled to

# %%
import math

from moecache import chapters
from moecache.experiments import loss_from_trace, mass_hypothesis
from moecache.experiments import loss_from_trace_judged as judging
from moecache.experiments import loss_from_trace_report as report
from moecache.figures import loss_from_trace as drawn

text = loss_from_trace.Text(num_documents, num_tokens, num_warmup_documents)
machine = loss_from_trace.Machine(hardware, round(expert_mebibytes * 2**20), scaled_layers)

# %% [markdown]
# ## Measure, and look at the trace
#
# MEASURED: the emulator's losses of the list of chapter 05 and of some of its rules at half and twice the slots, under decayed counts, and
# with background admission. SIMULATED: the same policies replayed over the exact model's trace, which is all that an estimate may use.
# Clusters of documents are dealt to two halves within their domains: fitted on one, judged on the other.

# %%
slots, measured, rows, fits, judged = {}, {}, {}, {}, {}
for name in model_names:
    num_experts, top_k = mass_hypothesis.geometry(name)
    shares = {"fitted": resident_fraction, "half": resident_fraction / 2, "twice": resident_fraction * 2}
    slots[name] = {place: max(math.ceil(share * num_experts), top_k) for place, share in shares.items()}
    measured[name] = judging.with_halves(loss_from_trace.measured(name, slots[name], num_rules, text))
    groups = loss_from_trace.all_policies(name, num_rules)
    rows[name] = judging.joined(measured[name], loss_from_trace.trace_rows(name, slots[name], groups, text, machine))
    layers = int(measured[name].columns.str.fullmatch(r"squared_l\d+_r0").sum())
    fits[name] = judging.fit_models(measured[name], mass_hypothesis.shape_of(name, layers), num_draws)
    judged[name] = [judging.judge(rows[name], fits[name], novelty) for novelty in loss_from_trace.NOVELTIES]

# %% [markdown]
# ## The form
#
# The form was chosen inside the fitted half: each family of policies left out in turn, how many times too much or too little was it
# estimated (typical factor)? *Mass* has its own two parameters and stands beside them.

# %% tags=["hide-input"]
chapters.show_table(report.form_table(fits))

# %% [markdown]
# Fitted weights as multiples of that of the last ranks; a weight multiplies *squared* gate weights, so rank 0 counts more than that
# already. A power of the sum above 1: damage grows faster than the squares. A power of the age above 0: calls of experts that were not
# called for long cost more.

# %% tags=["hide-input"]
chapters.show_table(report.weight_table(fits), digits=2)

# %% [markdown]
# ## Estimated against measured
#
# ESTIMATED from the trace, against MEASURED, on documents that no fit has seen: {{num_judged}} policies of {{model}}, {{num_unclear}} of
# them with a loss not clear of zero. The 90 % intervals hold the sampling of the fitted documents and the formula's own error on
# families that it had not seen. The line is equality.

# %% tags=["hide-input"]
chapters.show(
    drawn.estimated_and_measured(report.points(judged)),
    alt=f"Estimated against measured perplexity increase of each judged policy, beside mass alone. {report.sentence(judged)}",
)

# %% [markdown]
# ## Test
#
# The unit is the cluster of documents of one origin: n = {{num_clusters}} in the judged half; policies are a fixed list, so there is no
# p-value over them. Planned: the coefficient (useful if its interval lies above 0.9) and by how much it is above that of a model of
# mass alone.

# %% tags=["hide-input"]
chapters.show_table(report.order_table(judged))

# %% [markdown]
# How far off, and how honest: the median error as a share of the measured loss, the median of estimate / loss (below 1: it says too
# little), and the share of policies whose measured increase lies inside their 90 % interval (planned: honest from 80 %).

# %% tags=["hide-input"]
chapters.show_table(report.error_table(judged), digits=2)

# %% tags=["hide-input"]
chapters.show_table(report.decision_table(judged))

# %% [markdown]
# ## What the trace does not show
#
# A stand-in's output changes what later layers see, so an emulated model calls other experts than the exact one. Below, for what the trace
# shows and what the emulated model's own routers said: the ratio of squared substituted weights in each layer, and of the estimates.
# Nothing is substituted before the first layer's router, so there the ratio is 1. Exploratory.

# %% tags=["hide-input"]
seen = {name: judging.seen_and_logged(measured[name], rows[name], fits[name].chosen) for name in model_names}
chapters.show_table(report.seen_table(seen), digits=3)

# %% [markdown]
# ## A front of {{num_policies}} policies
#
# Rules times evictions times admissions at one capacity, each SIMULATED ({{hardware}}, {{expert_mebibytes}} MiB an expert, scaled to
# {{scaled_layers}} layers) and ESTIMATED. The {{num_best}} that the estimate calls best at their seconds were then emulated; one is
# *confirmed* if no emulated policy that takes no more seconds loses less by more than 10 %. Measured on the judged half, 95 % intervals
# over clusters.

# %%
swept, emulated = {}, {}
asked = {"resident_fraction": resident_fraction, "num_rules": num_rules, "num_draws": num_draws}
for name in model_names:
    base, chosen = slots[name]["fitted"], fits[name].chosen
    swept[name] = loss_from_trace.sweep_rows(name, base, lambda: chosen, num_policies, num_sweep_documents, text, machine, asked)  # noqa: B023
    labels = judging.best(swept[name], num_best)
    top = [pair for pair in loss_from_trace.candidates(mass_hypothesis.geometry(name)[1], num_policies) if pair[1].label in labels]
    front = judging.with_halves(loss_from_trace.measured_front(name, base, top, text))
    front_groups = {"front": [("fitted", *pair) for pair in top]}
    front_rows = judging.joined(front, loss_from_trace.trace_rows(name, slots[name], front_groups, text, machine))
    emulated[name] = report.at_capacity(rows[name], front_rows, base, labels)

# %% tags=["hide-input"]
chapters.show(
    drawn.front(report.stacked(swept), report.stacked(emulated)),
    alt=f"Simulated milliseconds against estimated increase of all policies, and what was measured of some. {report.front_words(emulated)}",
)

# %% tags=["hide-input"]
chapters.show_table(report.best_table(emulated[model_names[0]], swept[model_names[0]]), digits=3)

# %%
settings = {"num_fitted": len(mass_hypothesis.listed_policies(8)), "num_policies": num_policies, "scaled_layers": scaled_layers}
settings |= {"hardware": hardware, "expert_mebibytes": expert_mebibytes}
chapters.values(**settings, **report.values(fits, judged, emulated, seen))

# %% [markdown]
# ## What it means
#
# In {{model}} the chosen form is *{{form}}* with a power of {{power:.2f}}. Over the models {{models}} and the four kinds of novelty
# ({{num_decisions}} decisions each): useful {{num_useful}} times, better than mass {{num_better}} times, honest {{num_honest}} times.
# Estimates from the exact model's trace are a median {{trace_shift:.2f}} times those from the emulated model's own routing. Of the
# {{num_best}} policies that the estimate calls best, the emulator confirms {{num_confirmed}}.
#
# `simulate(trace, policy, num_slots, quality=model)` and `sweep(..., quality=model)` give such estimates for any trace of the fitted model.
#
# ## What it does not mean
#
# A fitted formula belongs to one language model, one fallback and one weight rule; the library refuses others. It is not a law: the weights
# of layers and ranks are whatever these policies taught it, and a rule that picks calls by something else than weight and rank may lie
# outside. An interval speaks of families like those of the list. Seconds are simulated, and their constants are one machine's; what
# matters here is the order along the front. A policy is not better because its estimate is: near the front, differences are smaller than
# the estimates' errors, which is why the best are emulated. Models of at most 14 million parameters were asked.
