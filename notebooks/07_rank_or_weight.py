# %% [markdown]
# # Rank or weight: what makes a substituted call expensive?
#
# Substituting a first choice costs far more than substituting a tenth. Is it because its gate weight is larger, or because the router
# put it first? In everything a policy does the two go together. Here they are set apart by experiment, and a third explanation is put
# beside them: how far the layer's output is moved, relative to the residual stream.

# %% [markdown]
# ## What we expect, and why
#
# A substitution adds w (f_s - f_r) to the layer's output: the routing weight times the difference of two experts' outputs. The weight
# is one factor. The rank may be the other, if experts that a router puts first also give longer or more particular outputs. Both would
# then be proxies of one thing, the length of what is added, over the length of the stream it is added to: the *relative layer error*
# e/h. We expect both to matter, to multiply, and to say little once e/h is known.
#
# The analysis was [fixed before the full run](../decisions/plan_06_07.md).

# %% tags=["parameters"]
model_names = ["reference-512"]  # reference models that read the texts
num_documents = 6  # held-out documents, domains interleaved
num_tokens = 120  # tokens of each document
num_warmup_documents = 2  # documents read just before the scored ones, which only set the slots
documents_per_block = 25  # documents measured and stored together
resident_fraction = 0.25  # share of a layer's experts that has slots
site_fraction = 0.125  # share of the tokens at which an error is injected, at all layers
num_documents_secondary = 6  # held-out documents of the two secondary designs, warm-up included
most_sites = 40  # substituted calls of each kind in one document and layer at most, in the secondary designs
spacing = 16  # tokens from one single call to the next
num_passes = 8  # passes of single calls over the documents
seed = 0  # of every draw of sites

# %%
from functools import partial

from moecache import chapters
from moecache.experiments import rank_or_weight
from moecache.experiments import rank_or_weight_report as report
from moecache.experiments import rank_or_weight_words_report as words
from moecache.experiments.contrasts_report import in_mnat
from moecache.figures.rank_or_weight import crossed_cells, kinds_of_calls

# %% [markdown]
# ## Measure
#
# The slots ({{resident_fraction:.0%}} of the experts) follow the router as if every miss were waited for; who stands in is the best
# resident outside the top-k. At one random token in {{one_in:.0f}} and at all layers, q (f_s - f_r) is added to the layer's output, for
# six ranks r and three weights q, always at the same sites ({{sites_a_document:.0f}} a document). *Who* is replaced and with *how much
# weight* are then independent: f_r is what the expert of rank r computes, whatever its own weight. {{num_scored}} documents in
# {{num_clusters}} clusters are scored.

# %%
stored = partial(
    rank_or_weight.stored,
    model_names=model_names,
    num_warmup_documents=num_warmup_documents,
    documents_per_block=documents_per_block,
    num_tokens=num_tokens,
    resident_fraction=resident_fraction,
    seed=seed,
)
crossed = stored("crossed", num_documents=num_documents, site_fraction=site_fraction)
bands = report.complete(stored("bands", num_documents=num_documents_secondary, most_sites=most_sites))
missed = stored("missed", num_documents=num_documents_secondary, most_sites=most_sites)
single = stored("single", num_documents=num_documents, spacing=spacing, num_passes=num_passes)
table = report.by_model(crossed, report.cells)

# %% [markdown]
# ## Identity and weight, crossed
#
# MEASURED. Left: each line is one identity, read from left to right it gets more weight. Right: the same cells against the relative
# layer error of their sites. If only e/h counted, all cells would lie on one curve.

# %% tags=["hide-input"]
chapters.show(crossed_cells(table), alt=words.describe(table))

# %% [markdown]
# The same in numbers, thousandths of a nat (mnat) a site with 95 % intervals (clusters drawn); q in multiples of the uniform weight
# 1/K. The last column is the root mean square of e/h at q = 1/K: what an expert of this rank moves when all are given the same weight.

# %% tags=["hide-input"]
chapters.show_table(report.by_model(table, report.crossed_table), digits=3)

# %% [markdown]
# ## Test
#
# Planned, primary. Unit: cluster of documents. *Weight at equal identity*: 2/K minus 0.5/K, mean of the ranks. *Identity at equal
# weight*: rank 0 minus the last rank, mean of the weights. *Interaction*: how much more weight costs at rank 0 than at the last. mnat a
# site; Holm over a model's three.

# %% tags=["hide-input"]
chapters.show_table(report.by_model(crossed, lambda frame: in_mnat(report.planned(frame))), digits=4)

# %% [markdown]
# ## What is left at equal e/h
#
# Planned, primary. A document's loss is a sum over its sites of a polynomial in e/h (degree four, one for each layer) plus a constant
# for each rank; the constants say what rank costs at equal e/h. The same for weight. Equivalent to nothing if the 90 % interval lies
# within a tenth of the raw gap.

# %% tags=["hide-input"]
chapters.show_table(report.by_model(crossed, report.regression), digits=3)

# %% [markdown]
# ## Calls as they are: equal weight, and missed calls against hits
#
# Secondary. Left: missed calls substituted in bands of gate weight, equally many of each rank in every document and layer. Right:
# missed calls and hits of the same rank, paired by weight within 10 %. {{num_scored_secondary}} documents.

# %% tags=["hide-input"]
kinds, pairs = report.by_model(bands, report.kinds), report.by_model(missed, report.kinds)
chapters.show(kinds_of_calls(kinds, pairs), alt=words.describe_kinds(kinds, pairs))

# %% [markdown]
# Ranks of a band still differ a little in weight, and come from different tokens:

# %% tags=["hide-input"]
chapters.show_table(report.by_model(kinds, report.kinds_table), digits=3)

# %% [markdown]
# Tests of neighbouring ranks in each band (planned, secondary; mnat a site, Holm over a model's pairs), and of missed calls against
# hits:

# %% tags=["hide-input"]
chapters.show_table(report.by_model(bands, report.band_tests), digits=3)

# %% tags=["hide-input"]
chapters.show_table(report.by_model(missed, report.missed_tests), digits=3)

# %% [markdown]
# ## Single calls
#
# Exploratory. One call every {{spacing}} tokens is substituted and its loss counted over the next {{spacing}} ({{num_single}} calls in
# all). How much of the variance of single losses does each predictor explain, on clusters that its fit has not seen?

# %% tags=["hide-input"]
chapters.show_table(report.by_model(single, report.explained_table), digits=3)

# %% [markdown]
# Means by layer, by tokens since the expert's last call, and by whether the call missed (mnat a call):

# %% tags=["hide-input"]
chapters.show_table(report.by_model(single, report.single_table), digits=3)

# %%
chapters.values(
    **words.values(crossed),
    resident_fraction=resident_fraction,
    one_in=1 / site_fraction,
    num_scored_secondary=int(bands["document"].nunique()),
    spacing=spacing,
    num_single=len(single),
)

# %% [markdown]
# ## What it means
#
# {{words}}
#
# So of rank and weight **{{both_matter}}**, and {{multiply}}. Of {{num_left_overs}} left-overs (rank and weight of each model),
# {{num_nothing_left}} are nothing within a tenth of the raw gap, {{num_something_left}} are something beyond it, and the others
# undecided.
#
# ## What it does not mean
#
# e/h needs the outputs of both experts: it explains what a substitution costs, and no policy can know it beforehand. An injected error
# is not a substitution: the other weights of the step stay as they are. A document's loss is taken as a sum over its sites, though they
# are dense; interactions between sites are part of the noise or of the polynomial. In the natural designs ranks come from different
# tokens, which is why they are secondary. Small models with one training run each were asked; intervals carry the sampling of texts
# only.
