# %% [markdown]
# # Does admitting experts in the background help when the topic changes?
#
# A rule that substitutes most misses hardly ever changes its cache. When the text turns to another topic, the cache holds the wrong experts
# and nothing brings the right ones in. *Background admission* is the remedy that a published study proposes: once the unserved calls of an
# expert have summed to a gate weight of 0.5, it is copied in without anyone waiting. Does that lower the loss, does it act just after a
# change, and would the same bytes have bought more elsewhere?

# %% [markdown]
# ## What we expect
#
# An account that must fill to 0.5 takes a few calls, so admission cannot act at the first tokens after a change; it should act some
# tens of tokens later, and matter less once the cache has settled. If substituted gate mass is what hurts, it must lower the loss
# wherever it lowers the mass. Two things speak against it. The accounts of experts with many *light* calls fill as well, and each
# landing takes the slot of another expert, perhaps of one whose rare calls are heavy. And every copy uses the link: a lower gate-weight
# threshold spends bytes too, on the heaviest misses only.
#
# **Planned** before the full run ([what holds for every plan](../decisions/plan_common.md)), for each model: the 0.15 rule under LRU
# with the domain changing at every document; admitted at 0.5 minus not admitted, tokens 0 to 47 and 48 to 239 of a document, and the
# same two spans against the threshold rule at equal *total* bytes. Two-sided t-tests over documents, Holm's correction over the four.
# Everything else is exploratory.

# %% tags=["parameters"]
model_names = ["reference-512"]  # reference models: the first gets every group of policies, the others the first three groups
domains = ["code", "scripture", "word_problems"]  # domains that take turns; empty: all
num_documents = 12  # held-out documents
num_tokens = 264  # tokens of each document; the last span begins at token 240
num_warmup_documents = 3  # documents read first and not scored
resident_fraction = 0.25  # share of a layer's experts that is resident
order_thresholds = [0.5]  # mass thresholds read in both orders of the documents
mass_thresholds = [0.0, 2.0]  # further mass thresholds, gate weight
gate_thresholds = [0.12, 0.09, 0.07]  # the threshold rule's curve, gate weight at ten calls a token
delays_tokens = [16]  # further delays from asking to landing, tokens
account_half_lives_tokens = [64]  # half-lives of accounts that decay, tokens
half_lives_tokens = [128]  # half-lives of decayed counts, tokens

# %%
import pandas as pd

from moecache import chapters, claims, results
from moecache.experiments import admission, inputs, topic_changes
from moecache.experiments import admission_report as report
from moecache.experiments.ages_report import ages_words
from moecache.experiments.contrasts_report import in_mnat
from moecache.figures import admission as drawn
from moecache.reference.texts import DOMAINS

sweep = {
    "order_thresholds": order_thresholds,
    "mass_thresholds": mass_thresholds,
    "gate_thresholds": gate_thresholds,
    "delays_tokens": delays_tokens,
    "account_half_lives_tokens": account_half_lives_tokens,
    "half_lives_tokens": half_lives_tokens,
}
text = {"num_documents": num_documents, "num_tokens": num_tokens, "num_warmup_documents": num_warmup_documents}
text |= {"domains": list(domains or DOMAINS), "resident_fraction": resident_fraction}

# %% [markdown]
# ## Measure
#
# The emulator runs the model with every expert in memory and replaces the router's choice where the policy says so. {{num_slots}} slots a
# layer; LRU; the cache is kept between documents, {{num_warmup}} of which only warm it. The {{num_scored}} scored documents
# ({{num_clusters}} origins) are read in two orders: *interleaved*, where every document follows one of another domain, and *in runs* of one
# domain. Tokens and exact losses are the same in both. {{num_changed}} documents see a change in the first order and none in the second.


# %%
def stored(model, group, order=topic_changes.INTERLEAVED):
    parameters = {"model": model, "group_name": group, "sweep": sweep, **text, "order": order}
    name = (
        "topic_changes" if group == "orders" and order == topic_changes.INTERLEAVED else "one_domain" if group == "orders" else "admission"
    )
    return results.load_or_run(
        f"08_{name}", parameters, lambda: admission.measure_reference(**parameters), inputs=inputs.reference_inputs(model)
    ).frame


few = ["thresholds", "curve"]
groups = dict.fromkeys(model_names, few) | {model_names[0]: [*few, "delays", "accounts", "caps", "evictions"]}
frames = [
    part
    for model in model_names
    for part in [*(stored(model, "orders", order) for order in topic_changes.ORDERS), *(stored(model, group) for group in groups[model])]
]
frame = pd.concat(frames, ignore_index=True)
model = model_names[0]
verdict = claims.verdict_on("f", report.one_for_claim(frame))
chapters.values(num_warmup=num_warmup_documents, **report.values(frame, model), others=report.other_models(frame, model_names[1:]))
chapters.values(verdict_f=str(verdict.state), evidence_f=verdict.evidence, ages=ages_words(["0.15 rule", "0.15 rule, admit at 0.5"]))

# %% [markdown]
# ## By distance from the change
#
# Left: what the change of domain costs each policy, interleaved minus in runs, on the {{num_changed}} documents that tell. Right: what
# admission at 0.5 changes against not admitting, where the domain has changed and where it has not. Means over documents with 95 %
# intervals; {{model}}.

# %% tags=["hide-input"]
change, effect = report.change_by_distance(frame, model), report.admission_by_distance(frame, model)
chapters.show(
    drawn.by_distance(pd.concat([change.assign(panel="Cost of the change"), effect.assign(panel="Effect of admission at 0.5")])),
    alt=f"Losses by distance from a document's start. {report.distance_words(change)} {report.distance_words(effect)}",
)

# %% [markdown]
# ## What the same bytes buy
#
# Every policy by the experts that it moves a step (fetches that are waited for, and copies nobody waits for). The line is the plain
# threshold rule without admission: what lies above it would have done better to wait for more misses. Both axes are logarithmic.

# %% tags=["hide-input"]
chapters.show(
    drawn.loss_by_moved(report.frontier(frame, model)),
    alt=f"Perplexity increase against experts moved a step. {report.frontier_words(frame, model)}",
)

# %% [markdown]
# Changes in thousandths of a nat with 95 % intervals; *fetches* and *copies* are a step, *mass* is the substituted gate weight of a
# step. *Equal bytes*: against the mixture of two neighbouring points of the threshold curve that moves as many experts.

# %% tags=["hide-input"]
chapters.show_table(report.shown(frame, model), digits=3)

# %% [markdown]
# ## Test
#
# The unit is the cluster of documents that share an origin, n = {{num_clusters}}; each document counts once. Thousandths of a nat a
# token; *smallest detectable* at a power of 80 %.

# %% tags=["hide-input"]
chapters.show_table(in_mnat(report.planned_tests(frame, model)), digits=3)

# %% [markdown]
# {{others}}

# %% [markdown]
# ## What it means
#
# Fetching every miss hits {{hit_interleaved:.1%}} of the calls when domains are interleaved and {{hit_in_runs:.1%}} in runs. The bare
# 0.15 rule loses {{change_near}} thousandths of a nat to a change in the first 48 tokens, {{change_far}} in the next 192, and
# {{change_later}} from then on; with admission at 0.5 the first figure is {{change_near_admitted}}.
#
# Admission at 0.5 takes the substituted gate mass of the 0.15 rule from {{bare_mass:.3f}} to {{admitted_mass:.3f}}
# ({{mass_change:+.0%}}) and its perplexity increase from {{bare_increase:.2%}} to {{admitted_increase:.2%}}: {{whole_gate}} thousandths
# of a nat over whole documents ({{whole_first}} for the first-choice rule). Just after a change (tokens 0 to 47) its effect is
# {{near_gate}}, in tokens 48 to 239 {{far_gate}}; this sample would have shown {{smallest_near:.1f}} and {{smallest_far:.1f}}. {{ages}}
#
# It moves {{admitted_moved:.2f}} experts a step, {{admitted_copies:.2f}} of them copies, where the bare rule moves {{bare_moved:.2f}}.
# The threshold rule that moves as many ({{equal_words}}) differs from it by {{near_equal}} and {{far_equal}} in the two spans (a
# positive number says that the admission loses more). {{equal_note}} Of the variants of the 0.15 rule with admission,
# *{{best_variant}}* has the lowest increase here, {{best_increase:.2%}}; it was picked among many and is no result.
#
# The claim (f) that admission helps, most of all just after a change ([all claims](../claims.md)): {{verdict_f}}. ({{evidence_f}})
#
# ## What it does not mean
#
# Documents here are about a thousand tokens at most, and every one begins anew: a change of domain comes together with a document's
# start. A long text on one subject gives an admission more time to pay. Equal bytes is not equal time: copies come while nobody waits,
# and where the link is idle anyway they are free ([seconds](03_from_misses_to_seconds.ipynb)). Thresholds of accounts are gate weight,
# so 0.5 means fewer calls where a router calls fewer experts. Other capacities are in [chapter 10](10_the_chosen_policies.ipynb).
