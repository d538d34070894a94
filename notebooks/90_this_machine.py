# %% [markdown]
# # This machine: what is it, and how fast are its parts?
#
# Seconds belong to a machine. This page says which one measured the seconds of this edition of the book, and what its
# memory, its disk, the products of one expert and one router hook cost on it. It takes part in no conclusion about
# policies; it is there to read the others by. It comes out different on every machine, and somewhat different every
# time on this one.

# %% [markdown]
# ## What we expect
#
# - A token decoded alone reads every weight that it needs once. So products should run at a rate that memory sets, and
#   the disk should be ten times slower.
# - For one token in bfloat16, a library that is made for large matrices may be slower than a plain loop. oneDNN is
#   such a library and torch's default on a CPU. We ask by how much.
# - The disk should be no single number. Reads of the *same* blocks a moment later may be faster than the first ones,
#   although the system's own cache is passed by, because a host may keep what its guest has read.
#
# Everything on this page is exploratory.

# %% tags=["parameters"]
hidden_size = 2048  # of the model whose expert is timed
expert_width = 512  # of that expert: three matrices of hidden_size x expert_width, 6 MiB in bfloat16
num_rounds = 4  # every part is measured once a round
pause_seconds = 0.0  # rest between two rounds
seconds_each = 0.15  # of each part in memory, a round
num_blocks = 12  # blocks read from the disk for each of its three parts, a round
file_mebibytes = 384  # size of the scratch file
scratch_folder = ""  # where the scratch file goes; empty: the system's temporary folder
hook_model_name = "reference-512"  # reference model whose router hooks are timed
hook_slots = 128  # its slots a layer
hook_tokens = 100  # tokens decoded one by one for each policy
hook_warm_tokens = 60  # tokens before them, not counted

# %%
import moecache as mc
from moecache import chapters, results
from moecache.experiments import inputs, this_machine, this_machine_hooks
from moecache.experiments import this_machine_report as report
from moecache.figures import this_machine as drawn

size = this_machine.ExpertSize(hidden_size, expert_width)
disk = {"directory": scratch_folder or None, "file_bytes": file_mebibytes * 2**20}

# %% [markdown]
# ## What it is

# %% tags=["hide-input"]
facts = results.load_or_run("90_facts", {}, this_machine.facts).frame
chapters.values(accelerator=facts.set_index("fact")["value"]["accelerator"], expert_mebibytes=2 * size.num_weights / 2**20)
chapters.show_table(facts)

# %% [markdown]
# Accelerator: {{accelerator}}. Where there is none, everything in this edition that is MEASURED in seconds was computed
# on the CPU.
#
# ## Measure
#
# {{num_rounds}} rounds over {{minutes:.1f}} minutes; in each round all parts one after the other. A unit of work is one
# expert of {{hidden_size}} x {{expert_width}} ({{expert_mebibytes:g}} MiB in bfloat16), taken in turn from more memory
# than the caches hold, or from random places of a scratch file of {{file_mebibytes:,}} MiB. The rate of a round is that
# of its median unit, on one thread; for reads in flight together it is that of all of them. *The same blocks again* are
# the blocks of *one read at a time*, read once more right afterwards.

# %%
asked = {"num_rounds": num_rounds, "seconds_each": seconds_each, "pause_seconds": pause_seconds, "num_blocks": num_blocks, **disk}
rounds = results.load_or_run(
    "90_rounds",
    {"hidden_size": hidden_size, "expert_width": expert_width, **asked},
    lambda: this_machine.measure_rounds(size, **asked),
).frame
found = report.values(rounds)
chapters.values(hidden_size=hidden_size, expert_width=expert_width, file_mebibytes=file_mebibytes, **found)

# %% [markdown]
# ## The parts

# %% tags=["hide-input"]
chapters.show(
    drawn.rates_by_part(report.rates(rounds)),
    alt=f"Rates of the parts in {found['num_rounds']} rounds: memory read at {found['read_rate']:.0f} GB/s, the disk at "
    f"{found['disk_rate']:.1f} ({found['disk_low']:.1f} to {found['disk_high']:.1f}), products in bfloat16 at {found['onednn_rate']:.0f} "
    f"with oneDNN and {found['plain_rate']:.0f} without.",
)

# %% [markdown]
# *Rates of the parts of this machine; each mark is a round. Above: all parts, on a logarithmic axis. Below: the disk's
# three ways over the minutes of the measurement. MEASURED.*

# %% tags=["hide-input"]
chapters.show_table(report.part_table(rounds), digits=3)

# %% [markdown]
# **Products.** One expert of one token takes {{onednn_ms:.2f}} ms in bfloat16 with oneDNN and {{plain_ms:.2f}} ms
# without: {{switch_ratio:.2f}} times as fast (lowest round {{switch_ratio_low:.2f}}, highest {{switch_ratio_high:.2f}}).
# The runtime therefore leaves oneDNN out while it decodes in bfloat16 on a CPU, and uses it for prompts. Without it,
# products read weights at {{plain_rate:.1f}} GB/s, where reading memory alone runs at {{read_rate:.1f}} GB/s.
#
# **Disk.** One read at a time gives {{disk_rate:.2f}} GB/s in the median round, between {{disk_low:.2f}} and
# {{disk_high:.2f}}; four in flight {{together_rate:.2f}} ({{together_low:.2f}} to {{together_high:.2f}}), which is
# {{queue_ratio:.2f}} times as fast (by rounds {{queue_ratio_low:.2f}} to {{queue_ratio_high:.2f}}). The same blocks
# again come {{repeat_ratio:.2f}} times as fast as the first time ({{repeat_ratio_low:.2f}} to
# {{repeat_ratio_high:.2f}}).
#
# ## The constants of the cost model
#
# What `mc.measure_hardware` says in a few seconds; [chapter 03](03_from_misses_to_seconds.ipynb) uses nominal constants
# instead, `mc.plan` can use these. Its product is float32 in NumPy, so that it needs no torch.

# %% tags=["hide-input"]
quickly = {"expert_bytes": 2 * size.num_weights, "seconds_each": seconds_each, **disk}
constants = results.load_or_run("90_constants", quickly, lambda: this_machine.constants(**quickly)).frame
chapters.values(derivation=constants["derivation"].iloc[0])
chapters.show_table(report.constants_table(constants, 2 * size.num_weights / 2**20))

# %% [markdown]
# How: {{derivation}}
#
# ## One router hook
#
# What the runtime adds to every layer of every token, beside products and waits: the kernel's decision, landing and
# asking for copies, writing the weights back. {{hook_model_name}} with its real routes, {{hook_slots}} slots a layer,
# experts in main memory, decoding one token at a time.

# %% tags=["hide-input"]
decoding = {"num_slots": hook_slots, "num_tokens": hook_tokens, "num_warm_tokens": hook_warm_tokens, "policies": list(mc.PRESETS)}
hooks = results.load_or_run(
    "90_hooks",
    {"model_name": hook_model_name, **decoding},
    lambda: this_machine_hooks.measure_hooks_of_reference(hook_model_name, **decoding),
    inputs=inputs.reference_inputs(hook_model_name),
).frame
chapters.values(hook_model_name=hook_model_name, hook_slots=hook_slots)
chapters.values(least_hook=hooks["median_us"].min(), most_hook=hooks["median_us"].max(), num_hooks=int(hooks["num_hooks"].min()))
chapters.show_table(report.hook_table(hooks), digits=3)

# %% [markdown]
# The median hook takes {{least_hook:.0f}} to {{most_hook:.0f}} microseconds, by policy ({{num_hooks:,}} hooks each).
# Means lie above medians where other work took the core away in the middle of a hook.
#
# ## What it means, and what it does not
#
# - A comparison of seconds must measure its parts in turn, in the same minutes. A rate from this page, used an hour
#   later, may be off by as much as its rounds disagree here. [Chapter 09](09_seconds_per_token.ipynb) therefore
#   measures the rates that it predicts from in its own run.
# - Low rounds are not the machine's fault alone: on a shared machine, neighbours use the same memory and the same disk.
#   The highest round is nearer to what the parts can do, the median to what one gets.
# - The scratch file was written just before it was read, so a host may hold part of it. A checkpoint that was
#   downloaded yesterday may be slower.
