# %% [markdown]
# # How fast are stock engines in the same memory?
#
# Other chapters compare policies within one runtime. A faster policy of a slow runtime is worth nothing, so here the runtime itself is
# asked: how many tokens a second does it decode, against engines that people use, **from the same weights, on the same text, in the
# same memory**? What is compared is one situation: *the experts do not fit*, and whatever is missing has to come from the disk.
#
# Stock engines solve this by mapping their files: the operating system reads a page when it is touched and drops pages when memory runs
# short. It knows no experts. It reads page by page, each read waits for the one before, and what it drops is what was touched longest
# ago, wherever it belongs. This project's runtime keeps whole experts in slots, reads whole blocks around the page cache, several at a
# time, and may decide not to wait.
#
# {{place_words}}

# %% [markdown]
# ## What we expect
#
# - Where experts do not fit, fetching every miss (whose output is exactly the model's) should be several times as fast as mapped files,
#   because the disk is used better; rules that substitute light misses should be faster again, at a price in quality.
# - Where everything fits, none of this helps. llama.cpp's products are better than ours, and it should win.
#
# **Planned** before the full run ([the plan](../decisions/plan_11.md)): fetching every miss at least 5 times, the 0.15 rule and
# quality-first at least 8 times as fast as llama.cpp's best, in each cap that does not hold all experts; and the same order of engines in
# every repeat. The rest is exploratory.

# %% tags=["parameters"]
engine_names = ["transformers, mapped files", "moecache, fetch every miss", "moecache, 0.15 rule"]  # engines; empty: all seven
model_name = "reference-64"  # the reference model that is widened
hidden_size = 512  # of the widened model: the small one's times a power of four
expert_width = 128  # units of a widened expert
resident_fractions = [0.5]  # caps in 16 bits: shares of the experts' bytes that fit beside the dense weights and the process
low_bit_fractions = []  # likewise in 4 bits
num_repeats = 1  # times that everything is run, each on another text
warm_tokens = 8  # of each run, decoded first and not timed
measured_tokens = 24  # of each run
process_mebibytes = 640  # of each cap, for interpreter, libraries and activations
thread_counts = []  # threads tried beforehand for llama.cpp; empty: one a core
read_ahead_kib = []  # read-ahead of the disk tried beforehand for engines that map files; empty: as it is
sweep_tokens = 24  # measured in each run of that trial
attempt_fractions = []  # caps in 16 bits in which changes to the runtime are tried; empty: none
agreement_tokens = 0  # compared with the exact model before any clock is read; 0: not compared on this page
timeout_seconds = 240  # after which a run is stopped
device = "cpu"  # where engines compute; "cuda" (UNVERIFIED): caps are then shares of the experts' bytes on a GPU
host_mebibytes = 16384  # cap of main memory beside a GPU

# %%
from moecache import chapters, claims, stats
from moecache.experiments import stock, stock_attempts
from moecache.experiments import stock_attempts_report as attempts_report
from moecache.experiments import stock_place_report as places
from moecache.experiments import stock_report as report
from moecache.experiments import stock_words_report as words
from moecache.experiments.ages_report import ages_words
from moecache.experiments.stock_places import Place
from moecache.experiments.stock_runs import Text
from moecache.figures import stock as figures

place = Place(device, host_mebibytes)
text = Text(model_name, hidden_size, expert_width, warm_tokens, measured_tokens, process_mebibytes, timeout_seconds, place)
stock.check_place(text, engine_names)
cells = stock.cells_of(resident_fractions, low_bit_fractions, place)
options = stock.Options(thread_counts, read_ahead_kib)

# %% [markdown]
# ## The same work
#
# {{model}} with experts of {{expert_mebibytes:.3g}} MiB: widened with padding that changes no result, so routes and text are a trained
# model's and bytes are a large one's ({{num_experts}} experts in each of {{num_layers}} layers, {{top_k}} called a token,
# {{experts_gibibytes:.2g}} GiB of experts). Every engine decodes the same tokens one by one under teacher forcing. {{agreement_words}}

# %% tags=["hide-input"]
chapters.values(model=model_name, **words.sizes(text), **places.place_values(text, engine_names, low_bit_fractions))
if agreement_tokens:
    agreement = stock.agreement(text, engine_names, cells, agreement_tokens)
    chapters.show_table(words.agreement_table(agreement), digits=2)
    chapters.values(agreement_words=words.agreement_words(agreement))
else:
    chapters.values(agreement_words="On this page their outputs were not compared; the full run does so before any clock is read.")

# %% [markdown]
# ## The same memory
#
# Each run is a process of its own. {{cap_words}} {{budget_words}} Pages of files count, whoever keeps them. {{spare_words}} The first
# {{warm_tokens}} tokens of a run warm it, the next {{measured_tokens}} are timed. {{left_out_words}} {{sweep_words}}

# %% tags=["hide-input"]
frame, swept = stock.measure(text, engine_names, cells, options, num_repeats, sweep_tokens)
chapters.values(warm_tokens=warm_tokens, measured_tokens=measured_tokens)
chapters.values(cap_words=words.cap_words(frame), sweep_words=words.sweep_words(swept), spare_words=words.spare_words(frame, text))
if len(swept):
    chapters.show_table(report.sweep_table(swept), digits=3)

# %% [markdown]
# The settings of each engine, as it reports them:

# %% tags=["hide-input"]
chapters.show_table(report.flags_table(frame))

# %% [markdown]
# ## Tokens per second
#
# {{mean_words}}; beside each, the peak of its memory as the operating system counts it,
# cached pages included.

# %% tags=["hide-input"]
table = report.rates(frame)
chapters.values(**words.values(frame))
chapters.show(figures.rates_by_cap(table), alt=words.alternative(table))

# %% [markdown]
# {{peak_words}}; *read* what came from the disk while tokens were timed.

# %% tags=["hide-input"]
chapters.show_table(report.shown_rates(table), digits=3)

# %% [markdown]
# {{disk_words}}

# %% [markdown]
# ## Test
#
# The unit is the repeat. Ratios of tokens per second, paired by repeat, with t-intervals of the mean logarithm; *smallest detectable* is
# the ratio that so many repeats would have shown in 80 % of cases.

# %% tags=["hide-input"]
tests = report.tests(frame)
chapters.values(order_words=report.order_words(frame), baseline=report.baseline_of(frame))
if tests is not None:
    chapters.show_table(stats.shown(tests).drop(columns=["effect size"]), digits=3)

# %% [markdown]
# {{order_words}}

# %% [markdown]
# ## Where the time goes, and what was tried
#
# An engine that maps its file has a small process, and every page that it touches is cached until memory runs short: with the disk's
# read-ahead at its best, a stock engine is a page cache of its experts. This project's runtime pays for an interpreter and its libraries
# out of the same cap, and holds whole experts. After the comparison had been seen, these changes were tried, each added to those before
# it, beside llama.cpp in the same repeats (exploratory; milliseconds are the runtime's own account of a token):
#
# {{attempt_words}}

# %% tags=["hide-input"]
if attempt_fractions and not place.is_gpu:
    tried = stock_attempts.measure(text, stock.cells_of(attempt_fractions), swept, options, num_repeats)
    chapters.show_table(attempts_report.shown(tried), digits=3)
    chapters.values(attempt_words=attempts_report.words(tried))
else:
    chapters.values(attempt_words="Nothing of this was run for this page.")

# %% [markdown]
# ## What the faster policies cost
#
# Fetching every miss gives exactly the model's output, as llama.cpp gives its own. The other policies do not. Perplexity increase of the
# *trained* models (whose routes these are) with a quarter of their experts resident, substituted experts staying out, from the stored
# full runs of [chapter 10](10_the_chosen_policies.ipynb) and [chapter 04](04_which_misses_matter.ipynb):

# %% tags=["hide-input"]
costs = words.quality([claims.stored_frame(name)[0] for name in words.QUALITY_EXPERIMENTS], words.POLICIES)
chapters.values(quality_words=words.quality_words(costs), ages=ages_words(words.POLICIES))
if len(costs):
    chapters.show_table(words.quality_table(costs))

# %% [markdown]
# {{quality_words}} {{ages}}

# %% [markdown]
# ## What it means
#
# {{meaning}}
#
# The source of the claim reports 2.8 to 3.0 times. The factors that were asked here, 5 and 8, came from single runs of a trial on other
# weights. The sweep above gave each stock engine the better of two read-aheads, and that alone is worth a factor of
# {{read_ahead_factor}} to llama.cpp in the smallest cap.
#
# Claim *faster than a stock engine at equal memory* (j, [all claims](../claims.md)): **{{verdict}}**. {{evidence}}

# %% tags=["hide-input"]
chapters.values(meaning=words.meaning(frame), read_ahead_factor=words.read_ahead_factor(swept), **words.verdict(frame))

# %% [markdown]
# ## What it does not mean
#
# - **When llama.cpp wins.** {{fitting_words}} It also has kernels for prompts, many tokens at once, while here only decoding, one token
#   at a time, was timed; and {{kernel_words}}.
# - The regime is {{regime_words}}. An engine that reads experts explicitly, as ours does, is not among the stock ones; the gain is over
#   mapping, not over every possible engine.
# - One machine, {{machine_words}} and its {{num_cores}} cores. On a faster disk the page-fault path may lose less, on a slower one
#   everything waits.
# - One model of {{num_layers}} layers. A large model has more layers and the same loop; fixed costs of a token weigh less there.
# - A text read under teacher forcing is what makes all engines do the same work. It is not generation, whose text each policy changes.
# - The comparison on another machine is one command, and its parameters are those of the box above:
#   `moecache run 11 --profile full`. {{command_words}}
