# %% [markdown]
# # Which of the choices that a rule leaves open change its loss?
#
# A rule such as "wait for misses of at least 0.15 gate weight" is completed by choices that it does not mention: who stands in and with
# which weight, whether standing in counts as a call, where the cache starts, in which order documents are read
# ([all of them](../choices.md)). Each chapter makes them in one way. Here each is switched by itself.

# %% [markdown]
# ## What we expect
#
# Choices about *what is computed* (the stand-in, its weight) act on every substituted call and should matter most. Choices about *what is
# resident* act through the misses that follow, and should matter less. Where the cache started should be forgotten after some hundred
# tokens; rounding router logits should be noise. Copies of every expert in two bits should cost less than stand-ins, though slots are
# given up for them. Some switches cannot change anything: under LRU an expert's place
# in the queue is set anew whenever it becomes resident, so whether its unserved calls counted is forgotten. Such a
# switch is *inert*, which is shown by its decisions, not by a small difference. Where a family renormalises its weights, rescaling a
# stand-in's to the old sum is inert too.
#
# Nothing here was planned as a test: all of it is exploratory, and intervals are not corrected for their number.

# %% tags=["parameters"]
model_names = ["reference-512"]  # reference models: the first reads every choice under the first rule, else only the core choices
rules = ["0.15 rule"]  # rules whose choices are switched
core_choices = ["substituted expert", "stand-in", "weight of the stand-in", "threshold"]  # read under every rule and model
num_documents = 8  # held-out documents, domains interleaved
num_tokens = 190  # tokens of each document
num_warmup_documents = 2  # documents read first and not scored
resident_fraction = 0.25  # share of a layer's experts that is resident

# %%
import pandas as pd

from moecache import chapters, results
from moecache.experiments import inputs, sensitivity
from moecache.experiments import sensitivity_report as report
from moecache.figures.sensitivity import change_forest

text = {"num_documents": num_documents, "num_tokens": num_tokens, "num_warmup_documents": num_warmup_documents}
text |= {"resident_fraction": resident_fraction}

# %% [markdown]
# ## Measure
#
# The emulator runs the model with every expert in memory; {{num_slots}} slots a layer; {{num_scored}} scored documents of {{num_units}}
# origins after {{num_warmup}} that warm the cache. Each setting is compared, document by document, with the run that differs in this
# choice only: mostly the default (LRU, a substituted miss stays out, the best resident stands in with its own weight, experts 0 to C-1
# resident at first), which loses {{default_mnat:.0f}} thousandths of a nat a token under the {{rule}} of {{model}}.


# %%
def stored(model, rule, choice):
    parameters = {"model": model, "rule": rule, "choice": choice, **text}
    return results.load_or_run(
        "92_sensitivity", parameters, lambda: sensitivity.measure_reference(**parameters), inputs=inputs.reference_inputs(model)
    ).frame


first = (model_names[0], rules[0])
pairs = [(model_names[0], rule) for rule in rules] + [(model, rules[0]) for model in model_names[1:]]
frames = [stored(*pair, choice) for pair in pairs for choice in sensitivity.asked(pair[1], [] if pair == first else core_choices)]
frame = pd.concat(frames, ignore_index=True)
table = report.changes(frame)
chapters.values(num_warmup=num_warmup_documents, **report.values(frame, table))

# %% [markdown]
# ## Every choice, one setting at a time
#
# Change of the loss with 95 % intervals over documents (those of one origin drawn together); right of zero is worse than the default.
# The axis is linear within ten thousandths and logarithmic beyond. A cross marks a setting that changed no decision at all, and no loss
# beyond rounding.

# %% tags=["hide-input"]
series = table["model"] + ", " + table["rule"]
chapters.show(
    change_forest(table.assign(series=series)),
    alt=f"Change of the loss by each setting of each open choice, thousandths of a nat. {report.alternative(table)}",
)

# %% [markdown]
# *Calls changed* is the share of all calls that were decided otherwise (another outcome or another computing expert), under the
# {{rule}}. The prompt's row waits for every miss of a document's first {{prompt_tokens}} tokens and is judged on the tokens after them.
# *Smallest detectable*: the mean difference that this sample would have shown with a power of 80 %, in thousandths of a nat (mnat).
# {{model}}.

# %% tags=["hide-input"]
chapters.show_table(report.shown(table, model_names[0]), digits=3)

# %% [markdown]
# {{others}}

# %% tags=["hide-input"]
for other in model_names[1:]:
    chapters.show_table(report.shown(table, other).assign(model=other), digits=3)
chapters.values(others="The core choices on the other model:" if model_names[1:] else "(One model was read.)")

# %% [markdown]
# ## What it means
#
# Of {{num_settings}} settings under the {{rule}}, {{num_clear}} have an interval that lies on one side of zero. The dearest is
# {{dearest}}, the cheapest {{cheapest}}. Clear of zero: {{clear_words}}. Not told apart from nothing in this sample: {{unclear_words}}.
# Inert: {{inert_words}}.
#
# Rounding the router's logits moves the loss by at most {{largest_rounding:.1f}} thousandths of a nat: results do not hang on the
# type in which a trace stores its scores.
#
# ## What it does not mean
#
# A setting that loses less here is no recommendation: it was not planned, other capacities and models may turn it. Choices were
# switched one at a time, so nothing is said about two at once. Low-bit copies are read at equal bytes of 16-bit experts and only where
# they leave a slot for each call of a token; prefetch fills the same slots, but what it moves is not counted here
# ([chapter 14](14_what_else_the_memory_could_buy.ipynb) counts both). Not switched: when a landing picks its victim (picking when asked
# would leave a slot empty meanwhile).
