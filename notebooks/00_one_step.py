# %% [markdown]
# # What happens in one step?
#
# A mixture-of-experts model owns far more weights than it uses for any one token. When they do not all fit where they
# are needed, some are kept close and the others are copied in when they are called for, and somebody has to decide,
# many times a token, which are worth waiting for. This chapter follows every such decision through {{num_tokens}}
# tokens of a layer that is small enough to be checked by eye. All later chapters count the same decisions by the
# million.

# %% [markdown]
# ## The words, and what we expect
#
# An **expert** is one of many small networks inside a layer of the model. A **router** looks at each token and gives
# every expert a number, the **router logit**. The experts with the highest numbers, the **top-k**, are **called** for
# this token; each contributes to the layer's output with a weight (the exponential of its router logit), and these
# weights, divided by their sum, are the **gate weights**. The call with the heaviest weight has **rank** 0 and is the
# **first choice**. One token at one layer is a **step**.
#
# Five letters serve the whole study: *T* tokens, *L* layers with experts, *E* experts a layer, *K* calls a step (the
# k of top-k), and *C* **slots** a layer, the **capacity**: the number of experts that can be **resident**, that is,
# ready to compute. Here *T* = {{num_tokens}}, *L* = 1, *E* = {{num_experts}}, *K* = {{top_k}} and *C* =
# {{num_slots}}. (The model that this study has in mind has *L* = 48, *E* = 512, *K* = 10.)
#
# A call to a resident expert is a **hit**, any other a **miss**. A miss can be **fetched**: the expert is copied into
# a slot while everybody waits, and the resident that had the slot, the **victim**, is evicted. Or a resident expert
# that was not called can **stand in**: the miss is **substituted**, nobody waits, and the output is a little wrong. A
# **policy** says which.
#
# What we expect is nothing to measure but something to understand: that one step is a *single* event. All *K* calls
# are looked up before anything is moved; who moves whom follows from a short, fixed order of rules. Whoever replays
# the calls one after the other gets another answer, and the last section shows why it is a wrong one.

# %% tags=["parameters"]
num_slots = 4  # slots a layer, C
gate_threshold = 0.4  # misses with at least this gate weight are waited for, like every first choice
mass_threshold = 0.5  # gate mass at which an expert is admitted in the background
admission_delay_tokens = 1  # tokens from asking for a background copy to its landing

# %%
import moecache as mc
from moecache import chapters, figures
from moecache.experiments import one_step

# %% [markdown]
# The policy of this page waits for first choices and for heavy calls, substitutes the other misses, evicts the
# **least recently used** resident (LRU), and has **background admission**, of which more below. The stream of tokens
# is written by hand; everything that happens to it is decided by the same compiled kernel that drives every
# instrument of this study.

# %%
policy = mc.Policy(
    wait_ranks=(0,),
    gate_threshold=gate_threshold,
    eviction="lru",
    admission="background",
    mass_threshold=mass_threshold,
    admission_delay=admission_delay_tokens,
)
trace = one_step.make_trace(one_step.STREAM)
story = one_step.walk(trace, policy, num_slots)
residents = story.residents[0]


def picture(*tokens):
    return figures.step_picture(story.log, trace.topk_ids, trace.gate_weights, residents, steps=tokens)


# %% tags=["hide-input"]
hit = one_step.first_token(story, mc.Outcome.HIT, at_least=trace.shape.top_k)
fetch = one_step.first_token(story, mc.Outcome.FETCHED)
stand = one_step.first_token(story, mc.Outcome.SUBSTITUTED)
landing = one_step.first_landing(story)
both = one_step.first_token(story, mc.Outcome.FETCHED, after=fetch)
shape = trace.shape
chapters.values(num_tokens=trace.num_tokens, num_experts=shape.num_experts, top_k=shape.top_k, num_slots=num_slots)
chapters.values(hit=hit, fetch=fetch, stand=stand, landing=landing, both=both, threshold=gate_threshold, mass_threshold=mass_threshold)
chapters.values(cold=one_step.names(residents), **one_step.facts(story, "fetch", fetch), **one_step.facts(story, "stand", stand))
chapters.values(**one_step.facts(story, "both", both), **one_step.landing_facts(story, landing))

# %% [markdown]
# ## What the router says
#
# Before the first token somebody must be resident. This study's default **cold start** fills the slots with the
# experts of lowest number: {{cold}}. Then token {{hit}} comes, and the router orders all {{num_experts}} experts:

# %%
chapters.show_table(one_step.router_table(story, hit), digits=2)

# %% [markdown]
# The first {{top_k}} are called. All are resident, so the step is as cheap as a step can be: every call is a hit, no
# expert moves. In the picture the slots stand on the left as they are when the calls are looked up, the calls in the
# middle, each bar as long as its gate weight, and on the right the slots after the step.

# %% tags=["hide-input"]
chapters.show(picture(hit), alt="One step with all calls answered by residents: each call is joined to its slot, and no slot changes.")

# %% [markdown]
# ## A miss worth waiting for, and its victim
#
# At token {{fetch}} the router's first choice is {{fetch_expert}} (gate weight {{fetch_weight:.2f}}), which is not
# resident. The policy waits for first choices, so {{fetch_expert}} is fetched and needs a slot. Who leaves?

# %% tags=["hide-input"]
chapters.show(picture(fetch), alt="One call is fetched into a slot whose resident is struck through; the other calls are hits.")

# %% [markdown]
# The experts that this very token calls are **pinned**: none of them can be a victim in this step, whatever its age.
# Among the others the victim is the one with the lowest **eviction score**. Under LRU the score is the time of the
# last call, and those who were never called come first. Ties go to the expert called longer ago, then to the lower
# number, so that every replay of the same scores decides alike. Read from the top, this is the order in which the
# residents before token {{fetch}} would have to go:

# %% tags=["hide-input"]
chapters.show_table(one_step.victim_table(story, fetch))

# %% [markdown]
# So {{fetch_victim}} leaves. Other evictions keep other scores, the number of calls so far for instance, but the
# victim is always the lowest: [chapter 02](02_capacity_and_eviction.ipynb) compares them.

# %% [markdown]
# ## A miss not worth waiting for, and its stand-in
#
# At token {{stand}} the missing expert is {{stand_expert}} with rank {{stand_rank}} and gate weight
# {{stand_weight:.2f}}: not the first choice, and lighter than the threshold of {{threshold:.2f}}. The policy does not
# wait. The router has ordered *all* experts, not only the ones it calls, and that order names the replacement: the
# best resident outside the top-k.

# %% tags=["hide-input"]
chapters.show_table(one_step.router_table(story, stand), digits=2)

# %% [markdown]
# Going down the table, the first resident that is not called is {{stand_by}}, so {{stand_by}} computes the call. (A
# second such miss in the same step would take the next one; nobody stands in twice for one token.)

# %% tags=["hide-input"]
chapters.show(
    picture(stand), alt="One call is missing and light; a dashed line runs from a resident that was not called to the call it serves."
)

# %% [markdown]
# Two things did *not* happen. No slot changed: substituting a miss does not make the missing expert resident. And
# {{stand_by}} was not called by the router, so standing in leaves its eviction score as it was. What the substitution
# costs is counted in **substituted gate mass**, the gate weight answered by another expert than the router's, here
# {{stand_mass:.2f}} of the step's 1.

# %% [markdown]
# ## Background admission: asked for now, resident later
#
# If {{landed}} keeps being called and keeps being replaced, the cache should learn. Every expert has a **mass
# account**: each call that was neither a hit nor fetched adds its gate weight. When an account reaches
# {{mass_threshold:.2f}}, a copy is asked for. Nobody waits for it; it **lands** {{landing_delay}} token later, before
# that token's calls are looked up, and the account returns to zero.

# %% tags=["hide-input"]
chapters.show_table(one_step.account_table(story, int(story.log.arrivals[0, 3])), digits=2)

# %% tags=["hide-input"]
chapters.show(
    picture(int(story.log.arrivals[0, 0]), landing),
    alt="Upper step: a substituted call asks for a copy. Lower step: the copy has arrived in a slot, and the expert's call is a hit.",
)

# %% [markdown]
# Token {{landing}} shows why the order of events matters. The landing needs a victim, and the residents that token
# {{landing}} calls are pinned *before* anything lands:

# %% tags=["hide-input"]
chapters.show_table(one_step.victim_table(story, landing))

# %% [markdown]
# By age alone {{oldest}} would have had to go. {{pin_story}} The victim is chosen when the copy lands, not when it is
# asked for, because in between the slot would stand empty for nothing. Time is counted in tokens here: a slow disk
# changes how many seconds a token takes, never what is decided.

# %% [markdown]
# ## Both kinds of miss in one step
#
# At token {{both}} two experts are missing. The first choice {{both_expert}} is waited for, the other miss is not.
# Waits are served first:

# %% tags=["hide-input"]
chapters.show(picture(both), alt="One miss is fetched and evicts a resident, the other is served by a resident that was not called.")

# %% tags=["hide-input"]
chapters.show_table(one_step.router_table(story, both), digits=2)

# %% [markdown]
# {{both_story}} That is as meant: an expert that is worth waiting for is worth more than the best replacement for one
# that is not.
#
# In the end {{hits}} of {{calls}} calls were hits, {{fetched}} were fetched and {{substituted}} substituted;
# {{admitted}} expert was admitted in the background. On average a step substituted {{mean_mass:.3f}} of its gate
# mass.

# %% tags=["hide-input"]
totals = mc.simulate(trace, policy, num_slots).summary()
chapters.values(
    **{name: totals[name] for name in ("hits", "calls", "fetched", "substituted", "admitted")}, mean_mass=totals["substituted_mass"]
)

# %% [markdown]
# ## The trap: replaying calls one after the other
#
# A list of calls looks like a list of requests, and it is tempting to hand it to an ordinary cache simulator, request
# by request. Take another stream of {{trap_tokens}} tokens and the plainest policy, fetch every miss with LRU. As
# single events, its steps look like this (the step of token {{trap}}):

# %%
trap_trace = one_step.make_trace(one_step.TRAP)
single = one_step.calls_by_call(trap_trace)
atomic = one_step.walk(trap_trace, mc.FETCH_EVERY_MISS, num_slots)
sequential = one_step.walk(single, mc.FETCH_EVERY_MISS, num_slots)
trap = one_step.first_token(atomic, mc.Outcome.FETCHED)
chapters.show(
    figures.step_picture(atomic.log, trap_trace.topk_ids, trap_trace.gate_weights, residents, steps=[trap]),
    alt="The step as one event: one call is fetched, the two others are hits because they were pinned first.",
)

# %% [markdown]
# And the same {{top_k}} calls handed over one by one:

# %% tags=["hide-input"]
places = [trap * shape.top_k + rank for rank in range(shape.top_k)]
weights = trap_trace.gate_weights.reshape(-1, 1, 1)
titles = [f"Token {trap}, only the call of rank {rank}" for rank in range(shape.top_k)]
chapters.show(
    figures.step_picture(sequential.log, single.topk_ids, weights, residents, steps=places, titles=titles),
    alt="The calls one by one: each fetch evicts the expert that the next call of the same token needs, so all three are misses.",
)

# %% tags=["hide-input"]
misses = {name: int((w.log.outcome != mc.Outcome.HIT).sum()) for name, w in (("atomic", atomic), ("sequential", sequential))}
chapters.values(trap=trap, trap_tokens=trap_trace.num_tokens, atomic_misses=misses["atomic"], sequential_misses=misses["sequential"])
chapters.values(trap_calls=int(trap_trace.topk_ids.size), trap_atomic=one_step.num_misses(atomic, [trap]))
chapters.values(trap_sequential=one_step.num_misses(sequential, places), **one_step.facts(atomic, "trap", trap))

# %% [markdown]
# As one event the step has {{trap_atomic}} miss, {{trap_expert}}; one by one it has {{trap_sequential}}. The single
# calls do not know what the token needs next: fetching {{trap_expert}} evicts the least recently used resident, and
# that happens to be the next expert called. No machine works that way. A layer receives all its {{top_k}} calls at
# once, computes them together, and would never throw out an expert it is about to use. Over the whole stream the
# one-by-one replay reports {{sequential_misses}} misses where there are {{atomic_misses}} (of {{trap_calls}} calls).
#
# This stream is made to show the trap at its worst. How large the error is on real router scores, and at which
# capacities, is measured in [chapter 02](02_capacity_and_eviction.ipynb).

# %% [markdown]
# ## What this means, and what it does not
#
# A step is: pin the called residents, land what is due, split the calls into hits and misses, fetch the misses worth
# waiting for, find stand-ins for the others, update the scores, add to the accounts. Every number of this study is a
# sum over such steps, made by one and the same compiled function, whether it only counts (the simulator), changes
# what a model computes (the emulator) or moves weights.
#
# The page says nothing about how good any of these choices is. Six tokens written by hand are an explanation, not
# evidence. Whether a light miss may be substituted is a question about the model's losses: [chapter
# 04](04_which_misses_matter.ipynb). All words used here are in the [glossary](../glossary.md).
