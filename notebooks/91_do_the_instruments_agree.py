# %% [markdown]
# # Do the instruments agree?
#
# Every number of this study comes from one of three instruments. The simulator replays a trace and computes nothing; the emulator runs the
# model with every expert in memory and does as if some were absent; the runtime keeps the experts elsewhere and really brings them. A
# statement that mixes them (losses from the emulator, hit rates from the simulator, seconds from the runtime) holds only if the three
# decide alike, call by call. This chapter runs them against each other and counts.

# %% [markdown]
# ## What we expect
#
# No difference at all where the same numbers meet the same kernel: the same decisions, and logits that are equal to the last bit. Two
# exceptions are known beforehand. A model that reads a text in one pass rounds otherwise than token by token, so that calls that hang
# on less than that rounding (*near ties*) may be decided otherwise. And the runtime multiplies by the transposed matrices of gpt_oss in
# another way than the library's grouped product does: there 1e-5 is allowed (the design, after a first trial, had asked for 1e-6).
#
# This is a check, not a test of a hypothesis: there is no sample to draw from, and one disagreement is one too many.

# %% tags=["parameters"]
model_names = ["qwen3_next", "gpt_oss", "deepseek_v3", "reference-512"]  # families (random models) and reference models
policy_names = ["fetch every miss", "first choice", "quality-first"]  # presets
num_tokens = 24  # read by each random model, in two documents
num_reference_tokens = 24  # read by each reference model, in two documents
resident_fraction = 0.25  # share of a layer's experts that is resident, at least top-k

# %%
import pandas as pd

from moecache import chapters, results
from moecache.experiments import agreements, inputs
from moecache.experiments import agreements_report as report
from moecache.experiments.tiny_families import FAMILIES

# %% [markdown]
# ## Measure
#
# Models: {{num_families}} random ones of different families ({{families}}), which route, group, correct and scale in different ways;
# and of the reference models {{trained}}, on held-out text. All in float32 on a CPU, where sums can be compared to the last bit.
# {{num_policies}} policies. What is compared with what:
#
# | comparison | what runs | what has to be equal |
# |---|---|---|
# | 1. all experts resident | emulator or runtime with room for all experts, and the model as transformers runs it | logits, to the bit |
# | 1. every miss fetched | the same with few slots | logits, to the bit |
# | 2. replay of the emulator | the emulator, and the simulator in a new process without torch, trace from a file | every decision |
# | 3. runtime and emulator | both token by token | every decision; logits to the bit |
# | 3. replay of the runtime | the runtime, and the simulator with the trace that the runtime recorded | every decision |
# | 4. one pass and token by token | the emulator in both ways | decisions but for near ties; logits within {{order_bound}} |
#
# A decision is the whole row of the log: what became of the call, who computed it, who was evicted, when copies arrived, and the
# substituted gate mass.


# %%
def stored(model):
    is_tiny = model in FAMILIES
    parameters = {"model": model, "policies": policy_names, "resident_fraction": resident_fraction}
    parameters["num_tokens"] = num_tokens if is_tiny else num_reference_tokens
    given = {} if is_tiny else inputs.reference_inputs(model)
    return results.load_or_run("91_agreements", parameters, lambda: agreements.measure(**parameters), inputs=given).frame


frame = pd.concat([stored(model) for model in model_names], ignore_index=True)
chapters.values(**report.values(frame))

# %% [markdown]
# ## What agrees
#
# **{{verdict}}** Together they cover {{num_calls}} calls, of which {{num_misses}} missed: where nothing misses, there is nothing to
# disagree about.

# %%
chapters.show_table(report.summary(frame))

# %% [markdown]
# The same by model. *Slots* are the fewest that were given. The largest difference of logits is over all comparisons: where it is not zero,
# it is the fourth's, or in gpt_oss the first's.

# %%
chapters.show_table(report.by_model(frame))

# %% [markdown]
# ## What it means
#
# Of the comparisons, {{num_exact}} had to be exact, and the largest difference of any logit among them is {{largest_exact}}. Between one
# pass and token by token, {{order_steps}} steps were decided otherwise where {{order_allowed}} near ties would have allowed it, and
# logits lie within {{order_largest:.1e}}.
#
# ## What it does not mean
#
# Three instruments that share a kernel can share a fault in it. Therefore the tests hold a second kernel in plain Python, which is
# compared with the compiled one on random streams, and a second computation of the experts, which is handed the log alone; neither
# shares code with the package. Nothing here is about speed, about bfloat16, or about a GPU: in bfloat16 the same switches of the
# processor's library must be set on both sides, and on a GPU logits are equal within a tolerance only.
