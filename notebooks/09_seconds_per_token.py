# %% [markdown]
# # Seconds per token: what does a policy gain on a real machine, and does the simulator know?
#
# [Chapter 03](03_from_misses_to_seconds.ipynb) computed seconds from decisions. Here a clock measures them: the runtime
# decodes a text with a model whose experts lie on a disk, or behind an emulated link, and visit a fixed number of
# slots. How long does a token take under each policy, where does the time go, and would the simulator have said so?

# %% [markdown]
# ## What we expect
#
# A policy that never waits takes $T$ a token, the time of a token of which everything is resident. Fetching every miss
# takes $T + W$. With $m$ misses among the $K$ calls of a layer, blocks of $B$ bytes, a link with latency $\ell$ and rate
# $r$, and $c$ seconds for the products of one expert, reads last $m (\ell + B / r)$ and hide behind the products of the
# calls that need no read, so
#
# $$W = \sum_{\text{layers}} \max\left(0,\; m (\ell + B / r) - (K - m)\, c\right), \qquad \text{ratio} = 1 + W / T.$$
#
# - The gain should fall with the rate of the link along this curve, for all policies that seldom wait alike. It is a
#   property of link and computation, not of anybody's code.
# - Reading in the background of decoding should be nearly as fast as reading alone: at least 85 % of a plain reader.
# - The simulator should be within {{asked_error:.0%}} for every policy on an emulated link, whose rate is known. On the
#   disk, whose rate drifts, we report its error.
#
# These bounds were set beforehand. Everything else is exploratory. What the study's claims say about seconds is decided
# in [chapter 10](10_the_chosen_policies.ipynb), from the rows measured here.

# %% tags=["parameters"]
model_names = ["reference-512"]  # reference models that are widened; the first is shown in detail
num_layers = 2  # layers of the widened model
hidden_size = 512  # of the widened model; real is 2048
expert_width = 64  # of its experts; real is 512
resident_fraction = 0.25  # slots as a share of a layer's experts
warm_tokens = 12  # tokens decoded first under each policy, not counted
measured_tokens = 36  # tokens that count, in blocks that take turns
gigabytes_per_second = [0.05, 0.2, 1.0]  # rates of the emulated links, 1e9 bytes a second
shown_gigabytes_per_second = [0.05, 0.2]  # two of them, shown beside the disk
capped_tokens = 0  # tokens measured against accelerate under a cap of memory, after 100 warm ones; 0: left out

# %%
import pandas as pd

from moecache import chapters
from moecache.experiments import seconds_per_token, seconds_under_cap
from moecache.experiments import seconds_per_token_report as report
from moecache.figures import seconds_per_token as drawn

asked = {"num_layers": num_layers, "hidden_size": hidden_size, "expert_width": expert_width, "resident_fraction": resident_fraction}
asked |= {"warm_tokens": warm_tokens, "measured_tokens": measured_tokens, "gigabytes_per_second": tuple(gigabytes_per_second)}
questions = [seconds_per_token.Question(name, **asked) for name in model_names]

# %% [markdown]
# ## Measure
#
# {{model}} is *widened exactly*: padded with zeros to hidden states of {{hidden_size}} and experts of width
# {{expert_width}}, so that routes and text are the trained model's and bytes are those of experts of
# {{expert_mebibytes:.3g}} MiB. Its first {{num_layers}} layers of {{num_experts}} experts, top-{{top_k}}, are
# {{packed_gigabytes:.1f}} GB in one packed file. Each layer has {{num_slots}} slots.
#
# All {{num_policies}} policies decode the same held-out text one token at a time, {{warm_tokens}} tokens that do not
# count and then {{num_tokens}} in {{num_blocks}} blocks that take turns (A B C, C B A, ...), so that whatever else the
# machine does meets all of them. Intervals draw these blocks again, the same for both sides of a ratio. *All hits* is
# fetch-every-miss's block decoded once more in the same slots, when all its experts are there: $T$, measured in place.
#
# **MEASURED** on the disk: experts are read past the system's cache. **MEASURED** over an *emulated* link: all experts
# lie in main memory, and a read ends no earlier than a link of that rate, with a latency of 80 microseconds, would let
# it. **SIMULATED**: the same decisions, replayed and timed by the cost model.

# %%
answers = [{name: seconds_per_token.answer(question, name).frame for name in seconds_per_token.FRAMES} for question in questions]
frames = answers[0]
policies, curve, formula = frames["policies"], frames["curve"], frames["formula"]
found = report.values(frames)
shown = ["disk", *(f"{rate:g} GB/s" for rate in shown_gigabytes_per_second)]
chapters.values(hidden_size=hidden_size, expert_width=expert_width, **found)

# %% [markdown]
# ## Reads against a plain reader
#
# While fetch-every-miss decodes, its reads are timed from the first asking of a step to the last byte. A plain reader
# then reads the same blocks in the same groups with the same number of threads and does nothing else; in every other
# block of tokens it reads first.

# %% tags=["hide-input"]
chapters.show_table(report.reads_table(frames["reads"]), digits=3)

# %% [markdown]
# The runtime reads at {{runtime_rate:.2f}} GB/s, {{read_ratio:.0%}} of the plain reader (interval {{read_low:.0%}} to
# {{read_high:.0%}}). Who reads the same blocks second may find them in a cache of the disk's host; the last two columns
# show both orders.
#
# ## Seconds per token, and where they go

# %% tags=["hide-input"]
bars = report.with_rest(policies[policies["link"].isin(shown)])
chapters.show(
    drawn.time_parts(bars, [report.link_words(link) for link in dict.fromkeys(bars["link"])]),
    alt=f"Milliseconds a token by policy on the disk and two emulated links, split by use. On the disk fetching every miss takes "
    f"{found['fetch_ms']:.3g} ms, of which {found['fetch_wait']:.0%} is waiting, quality-first {found['quality_ms']:.3g} and a token of "
    f"hits only {found['floor_ms']:.3g}.",
)

# %% [markdown]
# *Milliseconds a token by policy and what they were spent on: the vocabulary head and the loop around it, dense layers with
# the library's own work, products of experts, routing, keeping books, waiting. Whiskers: 95 % interval of the whole over
# {{num_blocks}} blocks. Left: this machine's disk. Others: emulated links. MEASURED.*
#
# On the disk:

# %% tags=["hide-input"]
chapters.show_table(report.seconds_table(policies, "disk"))

# %% [markdown]
# Fetching every miss takes {{fetch_ms:.3g}} ms a token with {{misses:.2f}} misses a layer, a token of hits only
# {{floor_ms:.3g}} ms. Quality-first is {{quality_ratio:.2f}} times as fast as fetching ({{quality_low:.2f}} to
# {{quality_high:.2f}}), speed-first {{speed_ratio:.2f}} times ({{speed_low:.2f}} to {{speed_high:.2f}}), the bare 0.15 rule
# {{rule_ratio:.2f}} and the bare first-choice rule {{first_ratio:.2f}}. *Bound* is what a plain reader would need for the
# bytes that are waited for, and then an all-hits token; the largest ratio to it on the disk is {{most_bound:.2f}}.
# Routing and keeping books add {{least_added_us:.0f}} to {{most_added_us:.0f}} microseconds a layer and token (means, by
# policy and link).
#
# All links, milliseconds a token:

# %% tags=["hide-input"]
chapters.show_table(report.link_table(policies), digits=3)

# %% [markdown]
# ## Did the simulator know?
#
# Its constants are taken from the same run: $T$ and $c$ from the all-hits blocks, the rate of the disk from the plain
# reader, the links as they were emulated. It replays what the routers said under each policy; in {{num_equal}} of
# {{num_predicted}} cases it makes the runtime's decisions, all of them. The error is the simulated time over the measured
# one, less 1.

# %% tags=["hide-input"]
predicted = frames["predicted"]
chapters.show(
    drawn.predicted_by_measured(predicted.assign(is_disk=predicted["link"] == "disk"), found["asked_error"]),
    alt=f"Simulated against measured milliseconds a token: {found['num_within']} of {found['num_link_predictions']} points of emulated "
    f"links lie within {found['asked_error']:.0%} of the diagonal; on the disk errors go from {found['disk_error_low']:+.0%} to "
    f"{found['disk_error_high']:+.0%}.",
)

# %% [markdown]
# *Simulated against measured time of a token, one mark a policy and link; grey band: within {{asked_error:.0%}}. The
# horizontal axis is MEASURED, the vertical one SIMULATED.*

# %% tags=["hide-input"]
chapters.show_table(report.error_table(predicted))

# %% [markdown]
# On emulated links {{num_within}} of {{num_link_predictions}} predictions are within {{asked_error:.0%}}; errors go from
# {{link_error_low:+.1%}} to {{link_error_high:+.1%}}, in the middle {{link_error_median:.1%}} either way. (By the median block of
# tokens, which other work on the machine moves less than the mean, {{num_within_median}} are.) On the disk they go from
# {{disk_error_low:+.1%}} to {{disk_error_high:+.1%}}.
#
# ## The gain against the link

# %% tags=["hide-input"]
points = curve[~curve["policy"].isin(["all hits", "substitute every miss"])]
chapters.show(
    drawn.ratio_by_link(points.assign(is_disk=points["link"] == "disk"), formula, (2.5, 3.0)),
    alt=f"How many times as fast as fetching every miss four policies are, by the link's rate: the formula's line falls towards 1 as the "
    f"link gets faster; on the disk, at {found['disk_rate']:.2g} GB/s, quality-first is {found['quality_ratio']:.2f} times as fast.",
)

# %% [markdown]
# *Times as fast as fetching every miss, against the rate of the link; whiskers: 95 % intervals over blocks. Filled:
# emulated links. Open: this machine's disk, at the plain reader's rate. Line: the formula. Grey band: the 2.5 to 3 times
# that the source reports. MEASURED, the line ESTIMATED.*
#
# Up to which rate of an emulated link a policy is so many times as fast as fetching:

# %% tags=["hide-input"]
chapters.show_table(report.crossing_table(curve, formula, [2.5, 3.0]))

# %% [markdown]
# A faster computer moves the whole curve to the right: with $T$ and $c$ halved, a link twice as fast gives the same gain
# (latency apart).
#
# The chosen policies on every link, for every model:

# %% tags=["hide-input"]
chapters.show_table(report.of_models(pd.concat([answer["policies"] for answer in answers], ignore_index=True)), digits=3)

# %% [markdown]
# ## Against accelerate in the same memory
#
# {{capped_story}}

# %% tags=["hide-input"]
capped = seconds_under_cap.answer(questions[0], capped_tokens)
chapters.values(capped_story=capped.story)
if capped.table is not None:
    chapters.show_table(capped.table, digits=3)

# %% [markdown]
# ## What it means
#
# - What a policy gains is a point on a curve that belongs to the machine. Whoever reports a speed-up should say how fast
#   the link was, how long a token of hits takes, and how many misses there were; the formula then gives the rest.
# - Every policy that seldom waits sits near the same floor. Between them the clock hardly chooses, the quality does
#   ([chapter 10](10_the_chosen_policies.ipynb)).
#
# ## What it does not mean
#
# - {{num_layers}} layers and a vocabulary head make the dense share of a token larger than in a deep model, so ratios
#   here are lower than such a model's on the same link.
# - Emulated links are bounds from below on time: a real bus has contention, a real disk has moods. Up to
#   {{most_late:.1%}} of the reads of a link ended later than the link would have let them, because main memory was not
#   faster.
# - A CPU computed. The back end for GPUs is another chapter's business when it has run on one.
# - The widened model's added weights are zeros. They cost what other weights cost; its text is the small model's, and
#   from {{num_layers}} of its layers it is no text at all. Nothing here speaks of quality.
# - Intervals are over blocks of one run on one machine. They know the noise of these minutes, not that of another day.
