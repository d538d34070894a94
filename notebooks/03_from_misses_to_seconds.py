# %% [markdown]
# # From misses to seconds: what is a policy worth on which machine?
#
# [Chapter 02](02_capacity_and_eviction.ipynb) counted copies. Nobody waits for a count. A copy takes as long as the
# **link** needs for it, some of that time hides behind computation, and copies that nobody asked to wait for get in
# the way of those that everybody waits for. This chapter turns the same decisions into seconds, on five machines, with
# a model of time: everything here is **SIMULATED**, no link, disk or GPU was touched.

# %% [markdown]
# ## What we expect
#
# - Waiting for every miss costs in proportion to misses x bytes / rate. On a slow link that is nearly all of the time,
#   on a fast one little; so rules that substitute misses should gain most where the link is slow, and all of them
#   should end at the same **floor**, the time of a token whose calls are all hits.
# - **Background admission** brings experts in without anybody waiting, as long as the link has idle time. On a busy
#   link its copies are late, and a late copy is a **stall**.
# - **Prefetching** guesses the experts of a layer before its router has spoken. It should raise the hit rate.
#   Others report that it nevertheless *slows down* decoding by 4 to 28 % on saturated links; we expect that too, and
#   ask how good the guesses must be.
# - The constants of a machine are uncertain. We expect them to move the milliseconds and to leave the order of the
#   policies alone.
#
# Planned are the comparisons under *Test*; the rest is exploratory.

# %% tags=["parameters"]
trace_path = ""  # a recorded trace with scores; empty: the reference models reading their held-out text
model_names = ["reference-512"]  # reference models, where there is no trace file; the first is shown in detail
num_documents = 8  # held-out documents, for the reference models
num_tokens = 550  # tokens a document, for the reference models
synthetic_tokens = 400  # tokens of the synthetic trace with 48 layers
warmup_fraction = 0.25  # share of a trace before the warm window, rounded up to a whole document
resident_fraction = 0.25  # slots as a share of a layer's experts
scaled_layers = 48  # MoE layers that times are scaled to
expert_mebibytes = [6.0, 1.69]  # sizes of an expert: bf16 and 4.5 bits a weight, of 2048 x 512 x 3 weights
hardware = ["pcie3", "pcie4", "pcie5", "nvme", "sata"]  # machines, by profile name
shown_hardware = ["pcie4", "nvme", "sata"]  # the three of them in figures
planned_hardware = ["pcie4", "nvme"]  # the two of them at which conclusions are drawn
gigabytes_per_second = [0.5, 1, 2, 4, 8, 16, 32, 64]  # link rates tried on one GPU and one CPU, 1e9 bytes a second
speed_up_level = 2.5  # speed-up whose place on the link axis is looked for
mass_thresholds = [0.0, 0.125, 0.25, 0.5, 1.0, 2.0]  # gate mass at which a background copy is asked for
delays_tokens = [1, 2, 4, 8, 16]  # tokens from asking to landing
accuracies = [0.4, 0.6, 0.8, 1.0]  # shares of predictions that come true, in the what-if
prefetch_limits = [2, 10]  # prefetches a step at most
factors = [0.5, 2.0]  # by which each constant is changed

# %%
import moecache as mc
from moecache import chapters, results
from moecache.experiments import capacity, other_models, seconds, seconds_copies
from moecache.experiments import seconds_report as report
from moecache.experiments import seconds_words as words
from moecache.figures import seconds as drawn
from moecache.figures import seconds_copies as drawn_copies

# %% [markdown]
# ## The model of time
#
# One layer of one token takes: the layer's fixed work (attention, router, shared experts), during which the link is
# idle and moves background copies; then the stall, if a copy that lands now is not complete; then fetches, one after
# the other, while the experts that are ready compute; the fetches' remainder is *waiting*; then the fetched experts
# compute. The constants of each machine:

# %% tags=["hide-input"]
chapters.show_table(words.machines([mc.Hardware.profile(name) for name in hardware], expert_mebibytes), digits=2)

# %% [markdown]
# They are nominal: published line rates times a protocol efficiency, measured by nobody here. The two disks feed main
# memory and a CPU computes; the three PCIe links feed a GPU.
#
# ## Measure
#
# Two traces. *Recorded*: what the routers of {{recorded_model}} say about {{recorded_documents}} held-out documents
# ({{recorded_tokens:,}} tokens, {{recorded_layers}} layers of {{num_experts}} experts, top-{{top_k}}), as if each of
# its experts were as large as those of a large model. *Synthetic*: {{synthetic_tokens:,}} tokens of made-up routers
# with {{synthetic_layers}} layers, tuned to published hit rates. Each layer has {{num_slots}} slots. Layers run one
# after the other, so times are scaled to {{scaled_layers}} layers.

# %%
setting = seconds.Setting(resident_fraction, warmup_fraction, scaled_layers)
first_model, text = model_names[0], {"num_documents": num_documents, "num_tokens": num_tokens}
parameters, inputs = capacity.key_of(trace_path, 0, num_documents, num_tokens, first_model)
parameters |= {"synthetic_tokens": synthetic_tokens, **setting._asdict()}
large, small = max(expert_mebibytes), min(expert_mebibytes)
kin, rungs = seconds.compared(), seconds.rungs()
main_names = ["0.15 rule", "first choice", "quality-first", "speed-first"]
main = [(family, policy) for family, policy in kin if policy.label in ("fetch every miss", *main_names)]


def stored(name, measure, **more):
    def opened():
        return measure(seconds.open_traces(trace_path, num_documents, num_tokens, synthetic_tokens, first_model))

    return results.load_or_run(f"03_{name}", {**parameters, **more}, opened, inputs=inputs).frame


# %%
facts = stored("traces", lambda traces: seconds.describe(traces, setting))
settings = {"policies": [policy for _, policy in kin], "hardware": hardware, "expert_mebibytes": expert_mebibytes}
times = stored("by_policy", lambda traces: seconds.by_policy(traces, kin, hardware, expert_mebibytes, setting), **settings)
planned = {"hardware": planned_hardware, "expert_mebibytes": large}
units = stored("by_unit", lambda traces: seconds.by_unit(traces["recorded"], main, planned_hardware, large, setting), **planned)

# %% tags=["hide-input"]
recorded, synthetic = (report.where(facts, trace=name).iloc[0] for name in ("recorded", "synthetic"))
chapters.values(recorded_model=trace_path or first_model)
chapters.values(
    recorded_documents=recorded["num_documents"], recorded_tokens=recorded["num_tokens"], recorded_layers=recorded["num_layers"]
)
chapters.values(**{key: recorded[key] for key in ("num_experts", "top_k", "num_slots", "units", "num_units")})
chapters.values(synthetic_tokens=synthetic["num_tokens"], synthetic_layers=synthetic["num_layers"], scaled_layers=scaled_layers)
faster = report.with_speed_up(times, ["trace", "hardware", "expert_mebibytes"])
first, last = shown_hardware[0], shown_hardware[-1]


def at(column, policy, machine, size=large, trace="recorded"):
    return report.value_at(faster, column, trace=trace, policy=policy, hardware=machine, expert_mebibytes=size)


# %% [markdown]
# ## Time per token
#
# Recorded trace, experts of {{large}} MiB (bf16). Note the scales: each machine has its own.

# %% tags=["hide-input"]
is_shown = (times["trace"] == "recorded") & (times["expert_mebibytes"] == large)
fetch = {name: at("ms_per_token", "fetch every miss", name) for name in hardware}
chapters.values(large=large, small=small, **{f"fetch_{name}": ms for name, ms in fetch.items()})
chapters.values(**{f"floor_{name}": at("ms_per_token", "substitute every miss", name) for name in hardware})
chapters.values(**{f"quality_{name}": at("speed_up", "quality-first", name) for name in hardware})
chapters.values(**{f"rule_{name}": at("speed_up", "0.15 rule", name) for name in hardware})
chapters.values(**{f"decayed_{name}": at("speed_up", "fetch, decayed count", name) for name in hardware})
chapters.show(
    drawn.time_parts(times[is_shown & times["hardware"].isin(shown_hardware)]),
    alt=f"Milliseconds a token by policy on three machines, split into computing, waiting and stalls: fetching every miss takes "
    f"{fetch[first]:.0f} on {first} and {fetch[last]:.0f} on {last}; every substituting rule lies far below.",
)

# %% [markdown]
# Waiting for every miss takes {{fetch_pcie4:.0f}} ms a token on PCIe 4.0, {{fetch_nvme:.0f}} from an NVMe disk and
# {{fetch_sata:.0f}} from a SATA disk. With a better eviction (decayed counts), and the model's output unchanged, it
# is {{decayed_pcie4:.2f}}, {{decayed_nvme:.2f}} and {{decayed_sata:.2f}} times as fast. Rules that substitute light
# misses come close to the floor ({{floor_pcie4:.1f}}, {{floor_nvme:.0f}} and {{floor_sata:.0f}} ms): the 0.15 rule is
# {{rule_pcie4:.1f}}, {{rule_nvme:.1f}} and {{rule_sata:.1f}} times as fast as fetching, quality-first
# {{quality_pcie4:.1f}}, {{quality_nvme:.1f}} and {{quality_sata:.1f}} times. How much a rule gains is a property of
# the machine: of what a miss costs against what a token costs without one. All five machines, in ms a token:

# %% tags=["hide-input"]
chapters.show_table(words.machine_table(times, "recorded", large), digits=3)

# %% [markdown]
# The same decisions with experts of {{small}} MiB (4.5 bits a weight):

# %% tags=["hide-input"]
chapters.values(**{f"small_{name}": at("speed_up", "quality-first", name, small) for name in hardware})
chapters.values(**{f"small_fetch_{name}": at("ms_per_token", "fetch every miss", name, small) for name in hardware})
chapters.values(**{f"synthetic_{name}": at("speed_up", "quality-first", name, large, "synthetic") for name in hardware})
chapters.show_table(words.machine_table(times, "recorded", small), digits=3)

# %% [markdown]
# Small experts make everything faster, and the *gain* from not waiting smaller: on PCIe 4.0 quality-first is
# {{small_pcie4:.1f}} times as fast as fetching instead of {{quality_pcie4:.1f}}. Whoever quantises the experts has
# already bought much of what substitution sells. On the synthetic trace with its {{synthetic_layers}} layers the
# speed-ups of quality-first at {{large}} MiB are {{synthetic_pcie4:.1f}} (PCIe 4.0), {{synthetic_nvme:.1f}} (NVMe) and
# {{synthetic_sata:.1f}} (SATA).

# %% [markdown]
# ## The rate of the link is what matters
#
# One GPU, one CPU, and links from a slow disk to PCIe 5.0. The dashed line is a speed-up of {{level}},
# the grey ones are the links of the machines above.

# %% tags=["hide-input"]
on = {"policies": [policy for _, policy in main], "gigabytes_per_second": gigabytes_per_second, "expert_mebibytes": expert_mebibytes}
curves = {
    device: stored(
        f"by_link_{device.lower()}",
        lambda traces, name=name, only=only: seconds.by_link_rate(
            {k: traces[k] for k in only}, main, name, gigabytes_per_second, expert_mebibytes, setting
        ),
        machine=name,
        **on,
    )
    for device, name, only in (("GPU", "pcie4", ["recorded", "synthetic"]), ("CPU", "nvme", ["recorded"]))
}
rated = {name: report.with_speed_up(curve, ["trace", "gigabytes_per_second", "expert_mebibytes"]) for name, curve in curves.items()}
panels = words.link_panels(rated, [("GPU", large), ("GPU", small), ("CPU", large)])
marks = {name: mc.Hardware.profile(name).link_bytes_per_second / 1e9 for name in hardware}
slow_ones = {"rule": "0.15 rule", "quality": "quality-first"}
crossed = {"policy": "quality-first", "level": speed_up_level}
chapters.values(
    level=speed_up_level,
    slow=min(gigabytes_per_second),
    gpu_large=words.up_to_rate(rated["GPU"], "recorded", mebibytes=large, **crossed),
    gpu_large_synthetic=words.up_to_rate(rated["GPU"], "synthetic", mebibytes=large, **crossed),
    gpu_small=words.up_to_rate(rated["GPU"], "recorded", mebibytes=small, **crossed),
    cpu_large=words.up_to_rate(rated["CPU"], "recorded", mebibytes=large, **crossed),
)
slow = {"trace": "recorded", "expert_mebibytes": large, "gigabytes_per_second": min(gigabytes_per_second)}
chapters.values(**{f"slow_{name}": report.value_at(rated["GPU"], "speed_up", policy=policy, **slow) for name, policy in slow_ones.items()})
chapters.show(
    drawn.speed_up_by_link_rate(panels[panels["policy"] != "fetch every miss"], speed_up_level, marks),
    alt="Speed-up over fetching every miss falls with the rate of the link for all rules and nears 1 at the right; with a CPU or small "
    "experts it is lower than with a GPU and large ones.",
)

# %% [markdown]
# With a GPU and experts of {{large}} MiB, quality-first is at least {{level}} times as fast as fetching
# {{gpu_large}} (synthetic trace: {{gpu_large_synthetic}}); with experts of {{small}} MiB {{gpu_small}}; with a CPU and
# {{large}} MiB {{cpu_large}}. The presets gain
# less than their bare rules where the link is slow ({{slow_quality:.0f}} against {{slow_rule:.0f}} times at {{slow}} GB/s):
# their background copies need the link too. "Two and a half times as fast" is
# therefore not a property of a policy or of its code. It is a point on this curve, and whoever reports a speed-up
# should report where on the curve it was measured.

# %% [markdown]
# ## Test: does it hold from text to text?
#
# A simulated time is exact for its constants; what can vary is the text. Each of the {{num_units}} {{units}} gives a
# time per token under each policy; the test is a paired t-test on their logarithms, *speed-up* the geometric mean of
# the ratios, the interval a bootstrap over {{units}}, *p* corrected for the whole table (Holm).

# %% tags=["hide-input"]
pairs = [(name, "fetch every miss") for name in main_names] + [("quality-first", "0.15 rule"), ("speed-first", "quality-first")]
tests = report.compare(units, pairs, planned_hardware)
for machine in planned_hardware:
    row = report.where(tests, hardware=machine, policy="quality-first", against="fetch every miss").iloc[0]
    chapters.values(**{f"test_{machine}": row["speed_up"], f"low_{machine}": row["low"], f"high_{machine}": row["high"]})
chapters.show_table(tests, digits=3)

# %% [markdown]
# Quality-first against fetching every miss: {{test_pcie4:.2f}} times as fast on PCIe 4.0 (interval
# {{low_pcie4:.2f}} to {{high_pcie4:.2f}}), {{test_nvme:.2f}} times from NVMe ({{low_nvme:.2f}} to
# {{high_nvme:.2f}}). These intervals know nothing about the constants.
#
# The same comparison with the routers of each model, each with the same share of its experts resident and experts as
# large as above. A model is one draw; no interval is over models.

# %% tags=["hide-input"]
models = (
    {"trace": units}
    if trace_path
    else other_models.seconds_by_model(model_names, text, [row for row in main if row[1].label in ("fetch every miss", "quality-first")],
                                       planned_hardware, large, setting)
)  # fmt: skip
held = other_models.seconds_table(models, "quality-first", "fetch every miss", planned_hardware)
chapters.values(num_models=len(models), num_faster=int((held["low"] > 1).sum()), num_rows=len(held))
chapters.values(least_speed_up=held["speed_up"].min(), most_speed_up=held["speed_up"].max())
chapters.show_table(held, digits=3)

# %% [markdown]
# In {{num_faster}} of {{num_rows}} of them quality-first is faster beyond its interval, by factors of
# {{least_speed_up:.2f}} to {{most_speed_up:.2f}}.

# %% [markdown]
# ## What background admission costs on a busy link
#
# The presets differ from their bare rules in two things, eviction and admission. To see them apart, both rules run
# with both evictions, with and without background admission at a gate mass of 0.5. Decayed counts, recorded trace:

# %% tags=["hide-input"]
asked = {"hardware": hardware, "expert_mebibytes": large}
corners = stored("corners", lambda traces: seconds_copies.by_corner(traces, hardware, large, 0.5, setting), **asked)
is_decayed = (corners["trace"] == "recorded") & (corners["eviction"] != "LRU") & corners["hardware"].isin(shown_hardware)
chapters.values(**words.admission_values(corners, hardware))
chapters.show(
    drawn.time_parts(corners[is_decayed]),
    alt="Milliseconds a token of two rules with and without background admission on three machines; stalls appear with admission and are "
    "largest on the slowest link.",
)

# %% [markdown]
# Both evictions, both rules: the change of time that admission makes, and the share of time that is stall.

# %% tags=["hide-input"]
chapters.show_table(words.admission_table(corners, "recorded", hardware), digits=3)

# %% [markdown]
# With the 0.15 rule and decayed counts, admission raises the hit rate from {{admit_hit_before:.1%}} to
# {{admit_hit:.1%}} and lowers the substituted gate mass from {{admit_mass_before:.3f}} to {{admit_mass:.3f}}. On PCIe
# 4.0 that changes the time by {{admit_change_pcie4:+.0%}}, from NVMe by {{admit_change_nvme:+.0%}}, from SATA by
# {{admit_change_sata:+.0%}}, of whose time {{admit_stall_sata:.0%}} is then stall (on the synthetic trace
# {{admit_stall_sata_synthetic:.0%}}, where copies spread over more layers). A link that is idle most of the time
# carries the copies for nothing; a saturated one makes everybody pay for them.
#
# Asking later costs less and adapts less. The 0.15 rule with decayed counts, recorded trace, by the gate mass at which
# a copy is asked for:

# %% tags=["hide-input"]
when = {**asked, "mass_thresholds": mass_thresholds, "delays_tokens": delays_tokens}
admission = stored(
    "admission",
    lambda traces: seconds_copies.by_admission({"recorded": traces["recorded"]}, hardware, large, mass_thresholds, delays_tokens, setting),
    **when,
)
ratios = words.admission_ratios(admission, corners, "recorded")
by_threshold = ratios[ratios["delay_tokens"] == 1]
anyway = report.where(by_threshold, mass_threshold=min(mass_thresholds)).set_index("hardware")["ratio"]
chapters.values(**{f"anyway_{name}": ratio for name, ratio in anyway.items()})
chapters.show(
    drawn_copies.time_by_threshold(by_threshold[by_threshold["hardware"].isin(shown_hardware)]),
    alt="Left: time over the time without admission falls towards 1 as the mass threshold rises, from many times on slow links. Right: the "
    "substituted gate mass rises with the threshold.",
)

# %% [markdown]
# Admitting every missed expert (threshold 0) moves as many bytes as fetching it, and stalls instead of waiting:
# {{anyway_pcie4:.1f}} times the time without admission on PCIe 4.0, {{anyway_sata:.1f}} times from SATA. It is a fair
# way to compare *rules* ([chapter 04](04_which_misses_matter.ipynb) uses it), not a way to save time.
#
# A copy that may land later has more idle time to hide in:

# %% tags=["hide-input"]
chapters.values(**words.delay_values(ratios, 0.5, last))
chapters.show_table(words.delay_table(ratios, 0.5, hardware), digits=3)

# %% [markdown]
# From {{delay_first}} to {{delay_last}} tokens of delay the stalls of the slowest link fall from
# {{delay_stall_first:.0%}} to {{delay_stall_last:.0%}} of the time, while the substituted gate mass goes from
# {{delay_mass_first:.3f}} to {{delay_mass_last:.3f}}.

# %% [markdown]
# ## Where prefetching helps, and where it hurts
#
# The what-if: a predictor that names, one layer ahead, ten experts, a given share of which the router then calls; its
# mistakes are the experts ranked just below. Those not resident are copied before the layer needs them. Lines below 1
# are faster than not prefetching. Recorded trace, {{large}} MiB. Open points are predictors that exist: what the
# *previous token* called, known a whole token ahead, and the *stale gate*, which asks the next layer's router about this
# layer's input.

# %% tags=["hide-input"]
guessed = {**asked, "accuracies": accuracies, "prefetch_limits": prefetch_limits}
bases = [mc.FETCH_EVERY_MISS, mc.QUALITY_FIRST]
prefetch = stored(
    "prefetch",
    lambda traces: seconds_copies.by_predictor(traces, bases, hardware, large, accuracies, sorted(prefetch_limits), setting),
    **guessed,
)
few, many = min(prefetch_limits), max(prefetch_limits)
wanted = [("fetch every miss", many), ("fetch every miss", few), ("quality-first", few)]
lines, points = words.prefetch_panels(prefetch, "recorded", wanted, hardware)
chapters.show(
    drawn_copies.time_by_accuracy(lines, points),
    alt="Time with prefetching over time without, against the accuracy of predictions, one line per machine: above 1 at low accuracy, and "
    "below 1 only with accurate predictions, on fast links, for a policy that waits for every miss.",
)

# %% [markdown]
# Hit rate, bytes and time a token on PCIe 5.0, fetching every miss with up to {{few}} prefetches a step:

# %% tags=["hide-input"]
chapters.values(few=few, many=many, **words.prefetch_values(prefetch, hardware, many))
chapters.values(stale_story=words.stale_story(prefetch, shown_hardware, few))
chapters.show_table(words.prefetch_table(prefetch, "recorded", "fetch every miss", "pcie5", few), digits=2)

# %% [markdown]
# The previous token's experts are nearly worthless as a prediction when every miss is fetched: they were called a
# moment ago, so they *are* resident ({{previous_copies:.2f}} prefetches a step, time {{previous_change:+.1%}}), although
# {{previous_accuracy:.0%}} of them are called again. Under a rule that substitutes, the same prediction brings in every
# expert that was substituted a token ago: it is background admission at threshold 0 under another name, with the same
# stalls ({{previous_quality_pcie4:.1f}} times the time on PCIe 4.0 with quality-first).
#
# {{stale_story}}
#
# In the what-if, predictions that come true {{example_accuracy:.0%}} of the time raise the hit rate from
# {{hit_without:.1%}} to {{hit_with:.1%}} with up to {{many}} prefetches a step, and change the time by
# {{example_change_pcie5:+.0%}} on PCIe 5.0, {{example_change_pcie4:+.0%}} on PCIe 4.0 and
# {{example_change_sata:+.0%}} from SATA. Prefetching moves every useful byte earlier, but never fewer bytes, and the
# useless ones besides; where the link was busy all the time already, there is no earlier. So it is judged by seconds,
# not by hits. How accurate the predictions must be before prefetching costs nothing:

# %% tags=["hide-input"]
chapters.show_table(words.break_even_table(prefetch, few))

# %% [markdown]
# For rules that substitute light misses there is little left to hide, and a prefetch is one more copy: there the
# question is whether the lower substituted mass is worth the seconds.

# %% [markdown]
# ## How much does it depend on the constants?
#
# Each constant of a machine halved and doubled, one at a time, recorded trace, {{large}} MiB. The bars say by how many
# percent the time moves for one percent of the constant (from doubling it; the overlap, which cannot double, has none).

# %% tags=["hide-input"]
varied = {**settings, "hardware": [first, last], "expert_mebibytes": large, "factors": factors}
answers = stored(
    "sensitivity", lambda traces: seconds.sensitivity(traces["recorded"], kin, [first, last], large, factors, setting), **varied
)
swaps = report.order_changes(answers)
chapters.values(**words.swap_values(swaps), num_policies=len(kin))
chapters.show(
    drawn.elasticity_bars(report.elasticities(answers, ["fetch every miss", "quality-first"], max(factors))),
    alt="Elasticity of time to each constant on a fast and a slow link: fetching every miss follows the link rate, quality-first "
    "the device and the fixed time of a layer, except on the slowest link.",
)

# %% [markdown]
# Fetching every miss is a statement about the link, quality-first on a fast link one about the device: their *ratio*
# inherits the uncertainty of both. The order is sturdier. Of the pairs among {{num_policies}} policies whose times
# differ by at least 1 %, at most {{most_swapped}} of {{num_pairs}} change places when any one constant is halved or
# doubled (on {{swap_machine}}, {{swap_constant}} x {{swap_factor:g}}); in {{num_unchanged}} of {{num_changes}} changes
# none does.

# %% [markdown]
# ## Seconds against substituted mass
#
# What is bought with what is substituted: rules from cautious to careless, bare and in the presets' cache. The line
# joins those that no other beats in both; more to the left is closer to the model's own output, lower is faster.

# %% tags=["hide-input"]
ladder = {"policies": [policy for _, policy in rungs], "hardware": shown_hardware, "expert_mebibytes": large}
steps = stored(
    "ladder", lambda traces: seconds.by_policy({"recorded": traces["recorded"]}, rungs, shown_hardware, [large], setting), **ladder
)
fronts = report.with_front(steps)
fronts = fronts.assign(is_admitting=fronts["policy"].isin([policy.label for _, policy in rungs if policy.mass_threshold]))
chapters.values(**words.front_values(fronts, shown_hardware), num_rungs=len(rungs))
named = ["fetch every miss", "first 1", "mass budget 0.1, admitting"]
chapters.show(
    drawn.time_by_mass(fronts[fronts["hardware"].isin([first, last])], names=named),
    alt="Milliseconds a token against substituted gate mass for many rules on a fast and a slow link; mass budgets with decayed counts and "
    "admission lie on the lower left line for small masses, first-choice and gate-weight rules for the fastest times.",
)

# %% [markdown]
# Of {{num_rungs}} policies {{front_pcie4}} lie on the line on PCIe 4.0, {{front_admitting_pcie4}} of them with decayed
# counts and background admission; from SATA {{front_sata}} and {{front_admitting_sata}}. Where they
# lie close together, the rules buy the same seconds with the same mass. Mass is not quality: what a
# unit of it costs in perplexity, and whether it costs the same under every rule, is the question of [chapter
# 04](04_which_misses_matter.ipynb).

# %% [markdown]
# ## What this means, and what it does not
#
# - This is a model of time, not a measurement. Believe its order and its crossovers, not its milliseconds: it knows no
#   kernel launches beyond a fixed time, no contention for memory between CPU and link, no noise, and one token at a
#   time. A disk has no single rate, either; the one here is nominal.
# - It does not know what a substitution costs in quality. The fastest rule on every machine is to substitute every
#   miss, and nobody should.
# - The decisions are the same on every machine, because logical time decides: a slow machine makes a copy late, not
#   absent. A real runtime that drops late copies would trade seconds for substituted mass.
# - The recorded trace has {{recorded_layers}} layers and is scaled to {{scaled_layers}}. For waiting and computing that
#   is exact. Background copies have fewer layers to spread over than in a real model of that depth, so stalls on fast
#   links are overstated; the synthetic trace has the depth, but made-up routers.
# - The predictor of the what-if makes independent mistakes. A real one is wrong where the router is undecided, which
#   may be better or worse.
