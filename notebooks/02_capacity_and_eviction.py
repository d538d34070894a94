# %% [markdown]
# # How much does a bigger cache or a better eviction buy?
#
# A miss costs a copy. There are two ways to have fewer misses without touching what the model computes: more
# **slots** a layer, or a better choice of **victim** when a slot is needed. This chapter counts what each buys, in
# hits, when every miss is fetched. The calls are those of **{{trace}}**: {{num_tokens:,}} tokens in {{num_documents}}
# documents, {{num_layers}} layers of {{num_experts}} experts, top-{{top_k}}.

# %% [markdown]
# ## What we expect
#
# More slots give more hits, with diminishing returns: the experts called most are resident already. About eviction
# the public record is divided. **LRU** evicts the expert whose last call lies furthest back (recency). **Counts**
# evict the expert with the fewest calls (frequency); on text of one kind they do well, on mixed text those that never
# forget keep yesterday's favourites. A **decayed count** lets a call weigh half as much after every half-life, so it
# lies between the two: a half-life of a token is nearly LRU, an endless one is the plain count. We expect an optimum
# in between, and FIFO, which looks at no call at all, to come last. Also compared: **random** victims; **LFRU**, calls
# divided by the time since the last one; **SLRU**, an LRU whose newcomers must be called twice to be protected; and a
# **static** cache, which holds the experts called most in the warm-up text and never changes.
#
# **Belady** evicts the expert whose next call lies furthest ahead. It reads the future, so it is no rival but a bound;
# *with bypass* it may also leave a newcomer out. What a policy loses against them says what there is left to gain.
#
# We also expect a replay of single calls, one after the other, to misjudge the number of misses, most where slots are
# few ([chapter 00](00_one_step.ipynb) shows why). Comparisons with LRU at {{slots_small}} and {{slots_large}} slots
# are planned; everything about other half-lives, layers and capacities is exploratory.

# %% tags=["parameters"]
trace_path = ""  # a trace file; empty: what the routers of the reference models say about their held-out text
trace_source = ""  # where that file was published, for titles
trace_num_experts = 0  # experts a layer, where the file does not say; 0: it does
model_names = ["reference-512"]  # reference models, where there is no trace file; the first is shown in detail
num_documents = 12  # held-out documents, for the reference models
num_tokens = 1000  # tokens a document, for the reference models
warmup_tokens = 4000  # tokens before the warm window, rounded up to a whole document
capacity_fractions = [0.03125, 0.0625, 0.125, 0.25, 0.5, 0.75]  # slots as shares of a layer's experts
planned_fractions = [0.125, 0.25]  # the two of them at which conclusions are drawn
other_fractions = [0.25, 0.5]  # the same for models after the first: more of their experts than one step calls
evictions = ["lru", "fifo", "random", "plain_count", "plain_count_forget", "decayed_count", "lfru", "slru", "static"]  # to compare
half_lives_tokens = [8, 32, 128, 512, 2048]  # half-lives of decayed counts, tokens
map_half_lives_tokens = [2, 8, 32, 128, 512, 2048]  # half-lives in the map of recency against frequency, tokens
topics = [[32, 2.0], [128, 2.0], [512, 2.0], [2048, 2.0], [512, 0.7]]  # synthetic traces: mean tokens of a topic, its pull on the router
map_tokens = 2000  # tokens of each synthetic trace of the map
map_layers = 4  # layers of each synthetic trace of the map
planned_half_life_tokens = 128  # the one of them at which conclusions are drawn
lru_target_fraction = 0.915  # hit rate for which LRU's number of slots is looked for

# %%
from moecache import chapters, results
from moecache.experiments import capacity, capacity_crossover, capacity_slots, other_models
from moecache.experiments import capacity_report as report
from moecache.figures import capacity as drawn
from moecache.figures import hit_rate_by_capacity

# %% [markdown]
# ## Measure
#
# Each policy waits for every miss and starts with the same experts resident; the cache is kept from document to
# document. Hits of the first documents, until {{warmup_tokens:,}} tokens have passed, are *cold* and shown apart. The
# rest is *warm*: {{num_units}} {{units}}.

# %%
first_model, text = model_names[0], {"num_documents": num_documents, "num_tokens": num_tokens}
parameters, inputs = capacity.key_of(trace_path, trace_num_experts, num_documents, num_tokens, first_model)
parameters["warmup_tokens"] = warmup_tokens
needed = list(dict.fromkeys(["lru", *evictions, *capacity.BOUNDS]))
compared = capacity.policies(needed, sorted({*half_lives_tokens, planned_half_life_tokens}))
belady, bypassing = (capacity.label(name) for name in capacity.BOUNDS)
bounds = [policy for policy in compared if policy.label in (belady, bypassing)]
main = [policy for policy in compared if policy.half_life in (None, planned_half_life_tokens) and policy not in bounds]
fractions = sorted({*capacity_fractions, *planned_fractions})


def stored(name, measure, **more):
    def opened():
        return measure(capacity.open_trace(trace_path, trace_num_experts, num_documents, num_tokens, first_model))

    return results.load_or_run(f"02_{name}", {**parameters, **more}, opened, inputs=inputs).frame


# %%
facts = stored("trace", lambda trace: capacity.describe(trace, warmup_tokens)).iloc[0]
planned = capacity.slots_of(planned_fractions, facts["num_experts"], facts["top_k"])
small, large = planned[0], planned[-1]
all_slots = capacity.slots_of(fractions, facts["num_experts"], facts["top_k"])
many = {"policies": compared, "fractions": fractions}
documents = stored("by_document", lambda trace: capacity.by_document(trace, compared, fractions, warmup_tokens), **many)
layers = stored("by_layer", lambda trace: capacity.by_layer(trace, compared, fractions, warmup_tokens), **many)
some = {"policies": main, "slots": planned}
worth = stored("worth", lambda trace: capacity_slots.worth_in_slots(trace, main, planned, warmup_tokens), **some)
target = stored(
    "target", lambda trace: capacity_slots.target_slots(trace, [lru_target_fraction], warmup_tokens), target=lru_target_fraction
)

# %% tags=["hide-input"]
rates, windows = report.hit_rates(documents), report.window_rates(layers)
report.check_evictions(windows[windows["policy"].isin([policy.label for policy in main]) & (windows["policy"] != "static")], planned)
report.check_evictions(target, target["num_slots"].to_list())
name = trace_source or (facts["model"] if trace_path else f"{first_model}, held-out text")
decayed = capacity.label("decayed_count", planned_half_life_tokens)
chapters.values(trace=name, slots_small=small, slots_large=large, warmup_tokens=facts["first_warm_token"], decayed=decayed)
chapters.values(**{key: facts[key] for key in ("num_tokens", "num_layers", "num_experts", "top_k", "num_documents")})
chapters.values(num_units=facts["num_units"], units=facts["units"], overlap=facts["neighbour_overlap"])

# %% tags=["hide-input"]
lru_small, lru_large = (report.rate_at(rates, report.LRU, slots) for slots in planned)
best_small, best_large = (report.rate_at(rates, decayed, slots) for slots in planned)
worth_small, worth_large = (int(report.rate_at(worth, decayed, slots, "lru_slots")) for slots in planned)
chapters.values(lru_small=lru_small, lru_large=lru_large, decayed_small=best_small, decayed_large=best_large)
chapters.values(fewer_by_slots=1 - (1 - lru_large) / (1 - lru_small), fewer_by_eviction=1 - (1 - best_small) / (1 - lru_small))
chapters.values(worth_small=worth_small, worth_large=worth_large, worth_fraction=worth_large / large - 1)
chapters.values(target=lru_target_fraction, target_slots=target["num_slots"].iloc[0], target_share=target["resident_fraction"].iloc[0])
chapters.values(large_fetches=facts["top_k"] * (1 - lru_large), target_fetches=facts["top_k"] * (1 - target["hit_rate"].iloc[0]))
public = report.public_rates(facts["num_experts"], facts["top_k"])
crosses = "Crosses are hit rates of LRU that others published for models of this routing geometry, on their texts."
chapters.values(beside_public=report.beside_public(rates, facts["num_experts"], facts["top_k"]), public_note=crosses if len(public) else "")

# %% [markdown]
# ## Hit rate by capacity
#
# The warm window, with 95 % intervals over {{units}}. {{public_note}}

# %% tags=["hide-input"]
is_main = rates["policy"].isin([policy.label for policy in [*main, *bounds[:1]]])
figure = hit_rate_by_capacity(rates[is_main].assign(source=name), num_experts=int(facts["num_experts"]))
chapters.show(
    drawn.add_public_points(figure, public),
    alt=f"Hit rate by slots, one line per eviction: LRU {lru_small:.0%} at {small} and {lru_large:.0%} at {large}, "
    f"{decayed} {best_small:.0%} and {best_large:.0%}; Belady, which knows the future, lies above all.",
)

# %% [markdown]
# How many slots LRU would need to hit as often as each of them:

# %% tags=["hide-input"]
names = {"num_slots": "slots", "hit_rate": "hit rate", "lru_slots": "LRU needs"}
chapters.show_table(report.in_percent(worth, ["hit_rate"]).rename(columns=names))

# %% [markdown]
# From {{slots_small}} to {{slots_large}} slots LRU goes from {{lru_small:.1%}} to {{lru_large:.1%}}: the extra slots
# remove {{fewer_by_slots:.0%}} of its misses. The decayed count hits {{decayed_small:.1%}} and {{decayed_large:.1%}}
# with the same slots; changing the eviction alone, at {{slots_small}} slots, removes {{fewer_by_eviction:.0%}} of the
# misses and needs no memory. In another currency: to hit as often as the decayed count does with {{slots_large}}
# slots, LRU needs {{worth_large}} ({{worth_fraction:+.0%}}); for its {{slots_small}} slots, {{worth_small}}.
#
# LRU reaches {{target:.1%}} at **{{target_slots}} slots**, that is, with {{target_share:.0%}} of each layer's experts
# resident. Even then every token makes each layer wait for {{target_fetches:.2f}} experts; at {{slots_large}} slots
# for {{large_fetches:.2f}}.
#
# {{beside_public}} A hit rate belongs to a text and a router as much as to a cache. Of the experts that a token
# calls, the routers of this trace have called {{overlap:.0%}} for the token before; the more they repeat themselves,
# the more any cache hits.

# %% [markdown]
# ## Cold and warm
#
# The first tokens find the experts of lowest number resident, which nobody asked for. How far the cold window lies
# from the warm one, and the fewest evictions that any layer saw in the warm window:

# %% tags=["hide-input"]
is_planned = windows["num_slots"].isin(planned) & windows["policy"].isin([policy.label for policy in main])
table = windows[is_planned].sort_values(["num_slots", "warm"], kind="stable")
table = report.in_percent(table, ["cold", "warm"])
chapters.show_table(table.rename(columns={"num_slots": "slots", "fewest_evictions": "fewest evictions a layer"}))

# %% [markdown]
# A policy that is judged where it hardly evicts is not judged at all: below 100 evictions in some layer this chapter
# stops with an error. (A static cache never evicts; it was calibrated on the cold window and is judged on the warm one.)

# %% [markdown]
# ## Test: is the difference to LRU more than chance?
#
# Every eviction read the same {{units}}, so each gives a difference of hit rates, and the test is a paired t-test
# over the {{num_units}} {{units}}. Differences are shares of the calls; intervals are a bootstrap over {{units}};
# *dz* is the mean difference in standard deviations of the {{units}}; *detectable* is the smallest difference that so
# many would show in four of five repetitions; *p* is corrected for all tests of the table together (Holm).

# %% tags=["hide-input"]
tests = report.compare(documents, [(policy.label, report.LRU) for policy in main if policy.label != report.LRU], planned)
found = tests[tests["policy"] == decayed].set_index("num_slots").loc[large]
chapters.values(verdict=report.verdict(found["low"], found["high"]), gain=100 * found["difference"], gain_dz=found["dz"])
chapters.values(gain_low=100 * found["low"], gain_high=100 * found["high"], worst=report.extreme(tests, large, is_best=False))
chapters.values(worst_note="" if report.extreme(tests, large, is_best=False) == "FIFO" else ", against our expectation")
chapters.show_table(tests.rename(columns={"num_slots": "slots", "smallest_detectable": "detectable"}).drop(columns="against"), digits=2)

# %% [markdown]
# At {{slots_large}} slots the {{decayed}} **{{verdict}}** LRU: {{gain:+.1f}} points of hit rate, interval
# {{gain_low:+.1f}} to {{gain_high:+.1f}}, dz = {{gain_dz:.2f}}. Last comes {{worst}}{{worst_note}}.

# %% [markdown]
# ## Does it hold for another model?
#
# The planned comparison once more, with each model's routers on the same held-out text. Other models than the first are
# read at {{other_shares}} of their experts. (An eighth of 64 experts are as many slots as a step of a top-8 router calls:
# every step then replaces all that it does not call itself, and no eviction has a choice. These shares were set when that
# had been seen.) A model is one draw: intervals are over {{units}} of one model, none is over models.

# %% tags=["hide-input"]
pair = capacity.policies(["lru", "decayed_count"], [planned_half_life_tokens])
if trace_path:
    models = {name: documents[documents["num_slots"].isin(planned)]}
else:
    models = other_models.hits_by_model(model_names, text, pair, planned_fractions, warmup_tokens, other_fractions)
held = other_models.hits_table(models, decayed)
chapters.values(num_models=len(models), num_rows=len(held), num_beaten=int((held["low"] > 0).sum()), num_lost=int((held["high"] < 0).sum()))
chapters.values(least_gain=held["gain"].min(), most_gain=held["gain"].max())
chapters.values(other_shares=" and ".join(f"{fraction:.0%}" for fraction in other_fractions))
chapters.show_table(held, digits=3)

# %% [markdown]
# In {{num_rows}} comparisons (models: {{num_models}}) the {{decayed}} beats LRU in {{num_beaten}} and loses in
# {{num_lost}}; its gain lies between {{least_gain:+.1f}} and {{most_gain:+.1f}} points.

# %% [markdown]
# ## How long should a call be remembered?
#
# Exploratory: decayed counts with other half-lives, as differences to LRU, and the plain count, which never forgets,
# at the right. Bands and bars are 95 % intervals over {{units}}.

# %% tags=["hide-input"]
inner = all_slots[1:-1]
lengths = report.gains(documents, [policy.label for policy in compared if policy.half_life], inner)
never = report.gains(documents, ["plain count"], inner)
chapters.values(**report.best_half_life(lengths, large), **{f"plain_{key}": 100 * x for key, x in report.span(never, "difference").items()})
chapters.show(
    drawn.gain_by_half_life(lengths, never, source=name),
    alt=f"Points of hit rate gained over LRU against half-life, one line per capacity; at {large} slots the highest gain is at "
    f"{report.best_half_life(lengths, large)['best_half_life']:g} tokens.",
)

# %% [markdown]
# At {{slots_large}} slots the best of these half-lives is {{best_half_life:g}} tokens ({{best_gain:+.1f}} points over
# LRU). Counts that never decay lie {{plain_low:+.1f}} to {{plain_high:+.1f}} points from LRU, depending on the
# capacity.

# %% [markdown]
# ## Where recency beats frequency
#
# Exploratory: the hit rate of decayed counts minus that of LRU, over capacity and half-life, "never" being the plain
# count. The first map is this chapter's trace. The others are *synthetic*: {{map_layers}} layers of made-up routers
# (512 experts, top-10) that prefer the experts of their topic, and topics that last so many tokens on average; in
# the last one the preference is weak, and what there is to know about an expert is how popular it is at all.

# %% tags=["hide-input"]
asked = {"half_lives_tokens": map_half_lives_tokens, "fractions": fractions[:-1]}
own_map = stored("map", lambda trace: capacity_crossover.hit_rate_map(trace, map_half_lives_tokens, fractions[:-1], warmup_tokens), **asked)
made = {"topics": topics, "num_tokens": map_tokens, "num_layers": map_layers, **asked}
maps = results.load_or_run("02_synthetic_maps", made, lambda: capacity_crossover.synthetic_maps(**made)).frame
panels = report.map_panels(own_map, maps, name)
chapters.values(map_layers=map_layers, **report.map_values(own_map, maps))
chapters.show(
    drawn.gain_maps(panels),
    alt="Heat maps of hit rate gained over LRU by capacity and half-life: half-lives much longer than a topic lose many points, "
    "shorter ones gain a few; where topics are weak, all gain.",
)

# %% [markdown]
# Both sides of the public dispute are on these maps. With topics of {{short_topic:,}} tokens a half-life of
# {{long_memory:,.0f}} tokens lies up to {{worst_loss:.1f}} points *below* LRU, with topics of {{long_topic:,}} tokens
# up to {{best_long:.1f}} points above it, and with weak topics {{best_weak:.1f}}. A memory pays while it is shorter
# than what it remembers stays true: recency is the right rule when topics change faster than counts forget. On
# {{trace}} the gains range from {{own_low:+.1f}} to {{own_high:+.1f}} points. Where slots hold nearly every expert in
# use, at the right, less hangs on the choice.

# %% [markdown]
# ## How far from the best possible?
#
# What is left to gain, at the two planned capacities. Grey: misses that even Belady with bypass has. Orange: what
# Belady loses by having to insert every miss. Blue: what a policy loses to Belady by not knowing the future.

# %% tags=["hide-input"]
gaps = report.gap_split(documents[documents["num_slots"].isin(planned)], belady, bypassing)
gaps = gaps[gaps["policy"].isin([policy.label for policy in main])]
chapters.values(**report.gap_values(gaps, decayed, small, "small"), **report.gap_values(gaps, decayed, large, "large"))
chapters.show(
    drawn.gap_parts(gaps, source=name),
    alt=f"Misses of each policy at {small} and {large} slots in three parts; the part that knowing the future would remove is the largest "
    "that differs between policies.",
)

# %% [markdown]
# At {{slots_small}} slots the best possible misses {{unavoidable_small:.1%}} of the calls and the {{decayed}}
# {{miss_small:.1%}}; of the gap between them {{bypass_small:.0%}} is explained by bypass, the rest by the future. At
# {{slots_large}} slots: {{unavoidable_large:.1%}}, {{miss_large:.1%}} and {{bypass_large:.0%}}. At most the first part
# is within reach of a rule that keeps newcomers out; the second takes predictions.

# %% [markdown]
# ## Layer by layer
#
# Every layer has its own slots and is on its own. At {{slots_large}} slots, warm window:

# %% tags=["hide-input"]
by_layer = report.layer_rates(layers, [report.LRU, "plain count", decayed, belady], large)
chapters.values(**{f"layer_{key}": x for key, x in report.span(by_layer[by_layer["policy"] == report.LRU], "hit_rate").items()})
chapters.show(
    drawn.hit_rate_by_layer(by_layer, source=name),
    alt=f"Hit rate of each layer at {large} slots, one line per eviction.",
)

# %% [markdown]
# LRU hits between {{layer_low:.1%}} and {{layer_high:.1%}}, depending on the layer. An equal number of slots for
# every layer may therefore not be the best use of a memory; an uneven one is not tried here.

# %% [markdown]
# ## The trap: replaying calls one by one
#
# A diagnostic, not a result. The same calls, each replayed as a step of its own, as an ordinary cache simulator would
# do it:

# %% tags=["hide-input"]
few = sorted({int(facts["top_k"]), *all_slots[:-1]})
shown = [policy for policy in main if policy.label in (report.LRU, "plain count", decayed)]
one_by_one = stored("one_by_one", lambda trace: capacity.sequential_misses(trace, shown, few, warmup_tokens), policies=shown, slots=few)
chapters.values(**{f"trap_{key}": x - 1 for key, x in report.span(one_by_one, "inflation").items()})
chapters.values(num_inverted=report.inverted_rankings(one_by_one), num_capacities=len(few), top_k=facts["top_k"])
chapters.show(
    drawn.inflation_by_capacity(one_by_one, source=name),
    alt="Misses of the one-by-one replay divided by the right number of misses, by capacity, one line per eviction.",
)

# %% [markdown]
# The misses so counted are wrong by {{trap_low:+.1%}} to {{trap_high:+.1%}}, and at {{num_inverted}} of
# {{num_capacities}} capacities another eviction looks best. Two errors work against each other. A fetch may evict
# what the same token needs next: that adds misses, and weighs most where neighbouring tokens call much the same
# experts. And under counts the newest resident has the lowest score, so the next call of the same token evicts it at
# once: the replay has turned into a cache that keeps newcomers out, which may even help where neighbours have little
# in common. No machine does either; a layer gets its {{top_k}} calls at once.

# %% [markdown]
# ## What this means, and what it does not
#
# - Slots cost memory, an eviction costs next to nothing. The table under the first figure says how many slots an
#   eviction is worth *on this text*.
# - A hit rate is a number of copies saved. It is not a speed (a copy may be hidden behind other work) and not a
#   quality: here nothing was substituted, so the model's output was exact throughout. What happens when misses are
#   not waited for is the question of [chapter 04](04_which_misses_matter.ipynb).
# - The reference model reads given text. Text that a model writes itself may repeat its experts more.
# - Documents share one cache in a fixed order, so neighbours are not quite independent; an order with other topic
#   changes gives other numbers. The intervals say nothing about other models, of which there are few here.
# - The reference model is small, with few layers, and its routers need not repeat themselves as those of large models
#   do. The command under *Rerun* takes any recorded trace (`trace_path`); one without scores is enough here.
# - Better evictions than these may exist. The best that is possible without knowing the future is not known; Belady is
#   the best with it, and how much of its lead a causal policy can get is an open question.
# - The synthetic maps say how the mechanism works, not how often real text behaves so.
