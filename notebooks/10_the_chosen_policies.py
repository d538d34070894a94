# %% [markdown]
# # What do the two chosen policies gain, and which of their parts gains it?
#
# A published study ends with two policies. **Quality-first** waits for first choices and for misses of at least 0.15 gate weight;
# **speed-first** waits for first choices only. Both also change two other things: the victim is the resident with the smallest *decayed
# count* of calls instead of the least recently used, and an expert whose unserved calls have summed to a gate weight of 0.5 is *admitted in
# the background*. Are they better than their bare rules, and if so, is that the eviction's doing or the admission's?

# %% [markdown]
# ## What we expect
#
# A rule that seldom waits seldom changes its cache: an expert that is substituted stays out and is missed again. Background admission
# mends that without anyone waiting, so it should lower the substituted gate mass, and the loss with it, for copies that cost link time
# only. A decayed count keeps what is called often, which should help a cache that changes rarely; but an expert admitted for many light
# calls takes the slot of one that is called seldom and heavily. So the two changes may work against each other, and only the 2 x 2 of
# eviction and admission can tell. A third admission is shown beside them: every substituted expert *admitted anyway*, resident from the
# next token on. Then all rules meet nearly the same misses.
#
# **Planned** before the full run, for each model at its first capacity, per document ([what holds for every
# plan](../decisions/plan_common.md); two-sided t-tests, Holm's correction over the eight of one model): for each policy the difference
# to its bare rule, the eviction's part (with nothing admitted), the admission's part (under LRU), and their interaction. Everything
# else on this page is exploratory, in particular other capacities and, where it is shown, the younger model.

# %% tags=["parameters"]
model_names = ["reference-512"]  # reference models: the first is read at every capacity, the others at the first one
exploratory_model_names = []  # further models, read at the first capacity: shown, and no part of any verdict
num_documents = 8  # held-out documents, domains interleaved
num_tokens = 200  # tokens of each document
num_warmup_documents = 2  # documents read first and not scored
resident_fraction = 0.25  # share of a layer's experts resident at the first capacity; the third capacity is half of it
lru_hit_rate = 0.915  # the second capacity is the fewest slots where LRU hits this share of the calls
timed_layers = 2  # this and the next five: chapter 09's parameters, whose seconds are shown
timed_hidden_size = 512  # of the widened model
timed_expert_width = 64  # of its experts
timed_warm_tokens = 12  # tokens that do not count
timed_tokens = 36  # tokens that count
timed_gigabytes_per_second = [0.05, 0.2, 1.0]  # rates of the emulated links

# %%
import pandas as pd

from moecache import chapters, claims, results
from moecache.experiments import chosen_policies, inputs
from moecache.experiments import chosen_policies_report as report
from moecache.experiments import chosen_policies_seconds_report as saved
from moecache.experiments.contrasts_report import in_mnat
from moecache.figures import chosen

text = {"num_documents": num_documents, "num_tokens": num_tokens, "num_warmup_documents": num_warmup_documents}
asked = {"resident_fraction": resident_fraction, "lru_hit_rate": lru_hit_rate}

# %% [markdown]
# ## Measure
#
# The emulator runs the model with every expert in memory and replaces the router's choice where the policy says so; losses are exact
# for that policy. All policies read the same {{num_scored}} documents of {{num_clusters}} origins in the same order, after
# {{num_warmup}} that only warm the cache; the cache is kept between documents. A stand-in is the best resident outside the token's
# top-k and gets its own routing weight. Thresholds are given for ten calls a token; with another number of calls they stay the same
# multiple of the uniform weight.


# %%
def stored(model, name, measure, **more):
    parameters = {"model": model, **text, **more}
    return results.load_or_run(f"10_{name}", parameters, lambda: measure(**parameters), inputs=inputs.reference_inputs(model)).frame


all_names = [*model_names, *exploratory_model_names]
found = [stored(model, "capacities", chosen_policies.capacities_of_reference, **asked).assign(model=model) for model in all_names]
capacities = pd.concat(found, ignore_index=True)
is_asked = (capacities["model"] == model_names[0]) | (capacities["place"] == 0)
wanted = capacities[is_asked].drop_duplicates(["model", "num_slots"])[["model", "num_slots"]].itertuples(index=False)
experiment = {name: "chosen_policies" if name in model_names else "exploratory_models" for name in all_names}
frames = [
    stored(model, experiment[model], chosen_policies.measure_reference, num_slots=int(slots), rule=rule)
    for model, slots in wanted
    for rule in chosen_policies.RULES
]
frame = pd.concat(frames, ignore_index=True)
judged = frame[frame["model"].isin(model_names)].reset_index(drop=True)
costs, effects = report.costs(frame), report.effects(frame)
model, slots_first = report.settings(frame)[0]
is_main = costs["model"] == model
timed = {"num_layers": timed_layers, "hidden_size": timed_hidden_size, "expert_width": timed_expert_width}
timed |= {"warm_tokens": timed_warm_tokens, "measured_tokens": timed_tokens, "gigabytes_per_second": timed_gigabytes_per_second}
blocks = saved.kept_blocks(model_names, resident_fraction, timed)
chapters.values(num_warmup=num_warmup_documents, seconds_story=saved.story(blocks, model_names), **report.values(frame, capacities))
chapters.values(**report.verdicts(judged, lambda claim, rows: claims.verdict_on(claim, rows, blocks)))

# %% [markdown]
# ## The 2 x 2 of eviction and admission
#
# Perplexity increase over fetching every miss, with 95 % intervals over documents (those of one origin drawn together). {{model}}; each
# column is a capacity, each line an admission. Parallel lines would mean that eviction and admission add up.

# %% tags=["hide-input"]
chapters.show(
    chosen.two_by_two(costs[is_main]),
    alt=f"Perplexity increase of both rules by eviction, admission and capacity. {report.corner_words(costs)}",
)

# %% [markdown]
# At {{slots_first}} slots. *Fetches* are waited for, *copies* come in the background; both are experts a step (one token at one layer),
# *moved* is their sum. *Mass* is the substituted gate weight a step. Compare policies at equal *moved* where the link is the
# bottleneck, at equal *fetches* where waiting is.

# %% tags=["hide-input"]
chapters.show_table(report.shown(costs, model, slots_first, capacities), digits=3)

# %% [markdown]
# ## Who owns the gain
#
# Change of the loss against what each part replaces; left of zero is a gain. *Eviction alone*: decayed count instead of LRU, nothing
# admitted. *Admission alone*: admitted at 0.5 instead of not at all, under LRU. *Both changes* is the chosen policy against its bare
# rule. Every capacity and model is shown.

# %% tags=["hide-input"]
chapters.show(
    chosen.effect_forest(report.with_setting_names(effects)),
    alt=f"Change of the loss by each part of the chosen policies, for every model and capacity. {report.owner_words(effects)}",
)

# %% [markdown]
# ## What they save in seconds
#
# The rows that [chapter 09](09_seconds_per_token.ipynb) timed: the runtime decodes with widened experts on a disk, or
# behind emulated links, at the first capacity; all policies take turns, block of tokens by block. **MEASURED**; 95 %
# intervals over blocks.
#
# {{seconds_story}}

# %% tags=["hide-input"]
if len(blocks):
    chapters.show_table(saved.table(blocks, model_names[0]), digits=3)

# %% [markdown]
# *Fetched* are calls that were waited for, *waiting* is the share of time. A time above 1 against the bare rule is what
# background copies and the other eviction cost, below 1 what they save.
#
# ## Test
#
# The unit is the cluster of documents that share an origin: n = {{num_clusters}}. Changes in thousandths of a nat a token (10 of
# them are about one per cent of perplexity); *smallest detectable* is the mean difference that this sample would have shown with a
# power of 80 %.

# %% tags=["hide-input"]
tests = [in_mnat(report.planned_tests(judged, *at)).assign(model=at[0]) for at in report.first_settings(judged)]
chapters.show_table(pd.concat(tests), digits=3)

# %% [markdown]
# ## What it means
#
# At {{slots_first}} slots quality-first costs {{quality_chosen:.2%}} (95 % interval {{quality_low:.2%}} to {{quality_high:.2%}}), the
# bare 0.15 rule {{quality_bare:.2%}}. The two changes together come to {{quality_both}} thousandths of a nat: that
# {{quality_direction}}. The eviction alone gives {{quality_eviction}}; the admission alone gives {{quality_admission}}; their
# interaction is {{quality_interaction}}. For it, quality-first moves {{quality_chosen_moved:.2f}} experts a step where the bare rule
# moves {{quality_bare_moved:.2f}}, and its substituted gate mass goes from {{quality_bare_mass:.3f}} to {{quality_chosen_mass:.3f}}.
#
# Speed-first costs {{speed_chosen:.2%}} ({{speed_low:.2%}} to {{speed_high:.2%}}), the bare first-choice rule {{speed_bare:.2%}}:
# {{speed_both}}, which {{speed_direction}}. Eviction alone gives {{speed_eviction}}; admission alone {{speed_admission}}; interaction
# {{speed_interaction}}. It moves {{speed_chosen_moved:.2f}} experts a step instead of {{speed_bare_moved:.2f}}.
#
# Fetching every miss moves {{fetch_all_lru:.2f}} experts a step under LRU and {{fetch_all_decayed:.2f}} under the decayed count.
#
# {{other_settings}}
#
# Claims decided here; g and i need both halves, perplexity and seconds ([all claims](../claims.md)):
#
# - *Both chosen policies are much faster, at little cost* (g): {{verdict_g}}. {{evidence_g}}
# - *Quality-first beats its bare rule* (h): {{verdict_h}}. {{evidence_h}}
# - *Speed-first saves a little time and is no worse* (i): {{verdict_i}}. {{evidence_i}}
#
# ## What it does not mean
#
# Percentages belong to this model, its training age and this text; a model trained for longer specialises, and every rule then costs
# more. What should carry over is who owns a gain and in which direction. Intervals carry the sampling of documents, not that of
# training seeds. Seconds are those of one machine, of two layers, and of a CPU; how the gain hangs on the link is the subject of
# [chapter 09](09_seconds_per_token.ipynb). Documents change their domain at every boundary here; a long text on one subject gives an
# admission more time to pay.
