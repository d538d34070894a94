# %% [markdown]
# # Are the reference models real language models with real routing?
#
# The study asks which expert misses matter, and it asks small models that anybody can run on a processor. Their
# answers are worth something only if those models are what they stand for: networks that learnt to predict text, whose
# routers learnt to send different text to different experts, in a pattern that resembles that of models people use.
# This chapter checks, on held-out text, what the reference models are, and says where they differ. There are two
# geometries and two weight rules, and of one of them two ages, because experts grow apart as a model is trained.

# %% [markdown]
# ## What we expect, and what would count against it
#
# A model like {{model}}, with {{total_parameters:.3g}} million parameters, that has read {{training_tokens:.1f}} million tokens must be
# far from good. It should still beat two things that know no meaning: a **5-gram model** with back-off trained on the
# same kind of text, and **xz**, which looks for repetitions. If it does not, it is a table of frequencies, and what
# becomes of its misses says nothing.
#
# Routing should be *uneven but not collapsed* (nearly every expert is called by something), *dependent on the domain*
# (the experts that one domain calls most are others than another's), and *local* (neighbouring tokens share experts,
# or no cache could help). And it should *matter*: with other experts in the same places the perplexity must rise at
# least by a factor of {{smallest_factor:g}}. If random experts do as well as the router's, no miss can matter.
#
# Two comparisons are planned: {{model}} against the 5-gram model and, for each model, the controls against the unchanged
# one. Everything else describes. Prose speaks of {{model}}; the tables show every model of this edition.

# %% tags=["parameters"]
model_names = ["reference-512"]  # reference models; the first is shown in detail
num_documents = 28  # held-out documents, domains interleaved
num_tokens = 300  # tokens of each document
warmup_tokens = 1500  # tokens before the warm window of hit rates, rounded up to a whole document
capacity_fractions = [0.0625, 0.125, 0.25, 0.5, 0.75]  # slots as shares of a layer's experts
lru_target_fraction = 0.915  # hit rate for which LRU's number of slots is looked for
hot_fraction = 0.125  # share of a layer's experts that makes up a hot set
num_ablation_documents = 14  # documents that the controls read, the first of them
smallest_factor = 1.5  # the controls must raise the perplexity by this factor for routing to count
num_questions = 8  # held-out questions of each family of tasks
ngram_order = 5  # tokens in the longest n-gram
ngram_training_tokens = 800000  # training tokens that the n-gram model counts, at most
xz_training_bytes = 200000  # bytes of a domain's training text that xz sees before the held-out text
seed = 0  # of controls and of the choice of training texts

# %%
from moecache import chapters, figures, results
from moecache.experiments import inputs, public_routes, reference_model, reference_tables
from moecache.experiments import reference_report as report
from moecache.experiments import reference_routing_report as routing
from moecache.experiments import reference_values_report as values
from moecache.figures import reference as drawn

main, text = model_names[0], {"num_documents": num_documents, "num_tokens": num_tokens}


def stored(table, model=main, **more):
    asked = {"model": model, **text, **more}
    name, hashes = f"01_{table}", inputs.reference_inputs(model)
    return results.load_or_run(name, asked, lambda: reference_tables.measure(table, **asked), inputs=hashes).frame


# %% [markdown]
# ## What it is
#
# Routing is what this study is about, so the routing geometry is that of a published model, number by number; the
# widths and the depth are not. Each model's card (`data/models/<name>/README.md`) says how it was made.

# %%
cards = {name: reference_model.card(name) for name in model_names}
logs = {name: reference_model.training_log(name) for name in model_names}
chapters.values(model=main, smallest_factor=smallest_factor, **values.training(cards[main], logs[main]))
chapters.show_table(report.sizes(list(cards.values())))

# %% [markdown]
# The training text is source code, mathematical and API documentation, the King James Bible, interface strings in many
# languages, and two families of generated tasks; the log below was written while it trained. One batch is noisy, so
# the line is a moving median.

# %% tags=["hide-input"]
chapters.show(
    drawn.training_curve(report.together(logs)),
    alt=f"Training loss of {', '.join(model_names)} against tokens read, steep at first and still falling at the end, with the rate below.",
)

# %% [markdown]
# The loss fell from {{first_loss:.1f}} to {{last_loss:.1f}} nats a token. That was {{per_parameter:.2f}} tokens a
# parameter; large models read hundreds. The curve is that of a model near the beginning of its life.

# %% [markdown]
# ## Does it predict text?
#
# Teacher-forced on held-out documents: modules, services, books, applications and templates of which nothing was
# trained on. **Perplexity** is exp of the mean token loss; **bits a byte** is the loss spread over the bytes of the
# text, which a compressor can be measured in too. The 5-gram model (interpolated Kneser-Ney) counted
# {{ngram_tokens:,}} tokens of the same training texts with the same tokenizer. xz packs all held-out documents of a
# domain as one stream, alone and after {{xz_training_bytes:,}} bytes of the domain's training text. Intervals (95 %)
# are a bootstrap over clusters: documents of one module, book or template are not independent.

# %%
documents = {name: stored("documents", name) for name in model_names}
ngram = stored("ngram", training_tokens=ngram_training_tokens, order=ngram_order, seed=seed)
xz = stored("xz", training_bytes=xz_training_bytes, seed=seed)
domains = {name: report.domains(documents[name], ngram, xz) for name in model_names}
versus = report.against_ngram(documents[main], ngram, main).iloc[0]

# %% tags=["hide-input"]
chapters.values(
    ngram_tokens=ngram["training_tokens"].iloc[0], xz_training_bytes=xz_training_bytes, **values.language(domains[main], versus)
)
chapters.show(drawn.bits_per_byte(report.bits_long(domains)), alt=report.describe_bits(domains))

# %%
chapters.show_table(report.domain_table(domains[main]))

# %% [markdown]
# The same for every model: perplexity, and bits a byte in brackets. All have the same tokenizer and read the same
# documents, so here perplexities may be compared.

# %%
chapters.show_table(report.by_model(domains))

# %% [markdown]
# Over all {{num_documents}} documents ({{num_clusters}} clusters) the perplexity of {{model}} is {{perplexity:.1f}}, against
# {{ngram_perplexity:.1f}} for the 5-gram model: the planned comparison gives {{gain:.2f}} nats a token in the model's
# favour (95 % interval {{gain_low:.2f}} to {{gain_high:.2f}}, dz = {{gain_dz:.1f}}, {{gain_p}}). The model is better,
# with an interval clear of zero, in {{num_better}} of {{num_domains}} domains, and needs fewer bits a byte than xz
# after training text in {{num_best}}. The hardest domain is {{hardest}} (perplexity {{hardest_perplexity:.0f}}), the
# easiest {{easiest}} ({{easiest_perplexity:.1f}}), where most of the text is given by its template.
#
# A perplexity belongs to a tokenizer and a text. None of these figures can be compared with those of other models;
# only bits a byte on the same bytes can, and no public model was run on them here.

# %% [markdown]
# ## Are the experts used?
#
# By layer, over the same text. *Experts called*: called at least once. *Busiest eighth*: the share of calls that goes
# to the eighth of the experts called most ({{even_eighth:.1%}} if all were called alike). *Balance*: E times the sum,
# over experts, of share of calls times mean router probability; 1 if even. *Entropy of use*: of the shares of calls;
# *entropy of a token's router*: of its router probabilities, the mean of all tokens. Both are divided by ln E, so 1 is
# even.

# %%
layers = {name: stored("layers", name) for name in model_names}
chapters.values(**values.health(layers, main))
chapters.show_table(routing.layer_health(layers))

# %% [markdown]
# In every layer at least {{called_low:.1%}} of the experts are called. The entropy of use of {{model}} is
# {{entropy_mean:.2f}} on average, {{entropy_first:.2f}} in layer 0 and {{entropy_last:.2f}} in the last layer. For a model of 512 experts
# others report about {{reported_entropy:.2f}}, and {{reported_first:.2f}} in layer 0, on texts of their own. A single
# token's router has an entropy of {{router_low:.2f}} to {{router_high:.2f}}: behind its top-k it spreads a long tail over
# the other experts.

# %% [markdown]
# ## How heavy is a call?
#
# Mean gate weight by rank, over all layers, beside three public models. Models that call fewer experts have heavier
# calls at every rank; compare the shape.

# %% tags=["hide-input"]
gates = {name: stored("gates", name) for name in model_names}
chapters.values(**values.gate_weights(gates[main], cards[main]["top_k"]))
chapters.show(
    figures.gate_weight_by_rank(routing.gate_weights(gates), highlight=main),
    alt=f"Mean gate weight by rank: {main} falls steeply after the first choice, then slowly; models with fewer calls lie higher.",
)

# %% [markdown]
# The first choice carries {{first_weight:.3f}} of a step's gate weight, {{first_multiple:.1f}} times an even share
# (by layer {{first_weight_low:.3f}} to {{first_weight_high:.3f}}); the public models' first choices carry
# {{public_multiple_low:.1f}} to {{public_multiple_high:.1f}} times theirs. The last rank still carries
# {{last_weight:.3f}}. One heavy and many light calls are what a step has here too; its first choice stands out
# {{standing}} theirs.

# %% [markdown]
# ## Do domains have their own experts?
#
# How often each domain calls each expert of the last layer, against an even spread. Experts are ordered by the domain
# that uses them most.

# %% tags=["hide-input"]
for name in model_names:
    use, last_layer = stored("use", name), cards[name]["num_layers"] - 1
    chapters.show(
        figures.expert_use(routing.named(use[use["layer"] == last_layer]), title=f"{name}, layer {last_layer}"),
        alt=f"{name}: use of the experts of layer {last_layer} by domain: blocks along the diagonal, experts that one domain uses several "
        "times as often as an even spread and others hardly at all.",
    )

# %% [markdown]
# Whatever one orders by its largest value shows a diagonal, also noise. The next picture cannot: each domain's
# clusters are dealt to two halves, and the **hot set** (the {{hot_fraction:.1%}} of experts called most) of one half
# is compared with that of the *other* half, of the same domain (diagonal) or of another one. Two sets drawn at random
# would share {{hot_fraction:.1%}}. Means over layers.

# %% tags=["hide-input"]
overlaps = {name: stored("overlaps", name, hot_fraction=hot_fraction) for name in model_names}
hot = {name: values.hot_sets(table) for name, table in overlaps.items()}
chapters.values(hot_fraction=hot_fraction, **hot[main])
for name, found in hot.items():
    chapters.show(
        drawn.hot_set_overlap(overlaps[name], chance=hot_fraction, title=name),
        alt=f"{name}: experts in common between hot sets: {found['hot_same']:.0%} for two halves of a domain, {found['hot_other']:.0%} for "
        f"two domains on average, most for {found['hot_nearest_pair']}, least for {found['hot_farthest_pair']}.",
    )

# %% [markdown]
# In {{model}}, two halves of a domain share {{hot_same:.0%}} of their hot sets, two different domains {{hot_other:.0%}}: most
# ({{hot_nearest:.0%}}) for {{hot_nearest_pair}}, least ({{hot_farthest:.0%}}) for {{hot_farthest_pair}}. Part of every
# hot set is common to all domains, part is the domain's own.

# %% [markdown]
# ## Is routing local, and what does a cache make of it?
#
# Counted from the recorded calls: LRU in each layer, every miss fetched, warm window. The last two columns say how many
# slots a layer would need for LRU to hit {{target:.1%}} of its calls.

# %%
warm, aim = {"warmup_tokens": warmup_tokens}, {"hit_rate": lru_target_fraction, "warmup_tokens": warmup_tokens}
hits = {name: stored("hits", name, shares=capacity_fractions, **warm) for name in model_names}
quarters = {name: stored("quarter", name, **warm) for name in model_names}
targets = {name: stored("target", name, **aim) for name in model_names}
targets_by_layer = {name: stored("target_by_layer", name, **aim) for name in model_names}

# %% tags=["hide-input"]
rows = {}
for name, card in cards.items():
    routing.check_warm_window(quarters[name], targets[name])
    rows[name] = routing.own_routing(card, layers[name], quarters[name], targets[name])
chapters.values(target=lru_target_fraction, **values.locality(rows[main], layers[main], targets_by_layer[main]))
local = {name: routing.layer_locality(layers[name], quarters[name], targets_by_layer[name], card) for name, card in cards.items()}
chapters.show_table(report.together(local))

# %% [markdown]
# With a quarter of the experts of {{model}} resident, LRU hits {{quarter_hits:.1%}} of all calls ({{quarter_low:.1%}}
# to {{quarter_high:.1%}}, depending on the layer). It hits {{target:.1%}} with **{{target_slots}} slots** a layer, that
# is, {{target_share:.0%}} of the experts ({{target_low}} to {{target_high}} if each layer gets its own number).
# [Chapter 02](02_capacity_and_eviction.ipynb) goes on from here.
#
# LRU's hit rate by share of the experts, beside public figures for other models. A band is a 95 % interval over
# documents.

# %% tags=["hide-input"]
rates = routing.hit_rates(hits, {name: card["num_experts"] for name, card in cards.items()})
chapters.show(drawn.hit_rate_by_share(rates), alt=routing.describe_hit_rates(rates))

# %% [markdown]
# All figures of routing in one table. The public models' rows were computed by the same functions from routes that
# others published; their texts are short, so fewer experts are called at all and more calls are first calls. The
# target is a hit rate of {{target:.1%}}.

# %% tags=["hide-input"]
sources = public_routes.SOURCES
chapters.values(gpt_source=sources[public_routes.GPT_OSS], qwen_source=sources[public_routes.QWEN3])
chapters.show_table(routing.beside_public(list(rows.values())))

# %% [markdown]
# Sources: gpt-oss-20b, {{gpt_source}}. Qwen3-30B-A3B, {{qwen_source}}. Reported figures as named in the picture; the one
# of kekzl/imp counts 300 tokens from an empty cache, so it holds many first calls.
#
# At a quarter resident, LRU's hit rate here lies {{position}} the range of the public figures ({{public_quarter_low:.0%}}
# to {{public_quarter_high:.0%}}). Neighbouring tokens share {{locality}} experts than those of the public models:
# {{overlap:.0%}} ({{overlap_first:.0%}} in layer 0, {{overlap_last:.0%}} in the last layer; {{chance:.0%}} by chance),
# against {{public_overlap_low:.0%}} to {{public_overlap_high:.0%}}. The first layers see little but the token itself,
# and neighbouring tokens are seldom alike.

# %% [markdown]
# ## Does it matter which expert answers?
#
# The same text again, the gate weights untouched and in their places, but the experts exchanged. *Shuffled*: every call
# is computed by another expert, always the same one for each. *Random*: by one drawn anew among those that the token
# did not call. *The next best*: by as many experts as it called, those that the router likes best after its own. *No routed
# experts*: their sum is left out. {{num_ablation}} documents, paired with the unchanged model.

# %%
asked = {"num_ablation_documents": num_ablation_documents, "seed": seed}
ablation = {name: stored("ablation", name, **asked) for name in model_names}
tables = {name: report.controls(frame, name) for name, frame in ablation.items()}
together = report.together(tables)
chapters.show(drawn.controls(together), alt=report.describe_controls(together))

# %% tags=["hide-input"]
chapters.values(**values.controls(ablation[main], tables[main], smallest_factor), everywhere=values.everywhere(tables, smallest_factor))
chapters.show_table(report.controls_table(together))

# %% [markdown]
# Paired t-tests over {{num_ablation_clusters}} clusters, corrected together in each model (Holm); *detectable* is the
# smallest difference that so many would show in four of five repetitions. In {{model}}, shuffled experts multiply the
# perplexity by {{shuffled:.1f}}, random ones by {{random:.1f}}: which expert answers **{{verdict}}**. {{everywhere}}
# Random experts cost {{random_or_none}} none at all (a factor of {{none:.1f}}). Even the next best {{top_k}}, all at
# once, cost a factor of {{next_best:.1f}}: a router's second choice is no copy of its first. That is the worst case of what a policy does,
# which substitutes some calls, not all of them ([chapter 04](04_which_misses_matter.ipynb)).

# %% [markdown]
# ## Does it solve anything?
#
# Two families of tasks were generated for training, with templates held out. Each question follows three solved items
# of its own held-out template; the model continues greedily, and the value it writes is compared with the right one.
# Nothing that it writes is executed. Beside it, what repeating the last item's answer would score.

# %%
answers = report.task_table({name: stored("tasks", name, num_questions=num_questions) for name in model_names})
chapters.values(**values.tasks(answers, main))
chapters.show_table(report.task_words(answers))

# %% [markdown]
# {{model}}: word problems {{solved_word_problems:.0%}} right, interpreter lines {{solved_interpreter:.0%}}. {{lost}} A loss of
# accuracy under a policy can only be seen where there is accuracy to lose, so chapters about generated text can use:
# {{useful}}.

# %% [markdown]
# ## What does training change?
#
# Experts start alike and grow apart, so a young model is hurt less by the wrong ones. The study therefore keeps the
# first stage of its main model beside the later weights and, in its full edition, shows both.

# %% tags=["hide-input"]
chapters.values(ages=values.ages(main, cards, domains, tables))

# %% [markdown]
# {{ages}} The interpreter lines are no fair comparison: the first stage was trained on an earlier, harder version of them.
# How much a miss costs is always the cost at an age.

# %% [markdown]
# ## What this means, and what it does not
#
# - {{model}} is a language model in the plain sense: it predicts held-out text {{beats}}, with an interval clear of zero in
#   {{num_better}} of {{num_domains}} domains. It is a *weak* one: {{training_tokens:.1f}} million tokens, {{num_layers}}
#   layers. It knows nothing that is not in seven narrow domains, and much of its text is code and templates.
# - Its routing is learnt: uneven without collapse, different by domain, and the choice of expert {{verdict}}. The number
#   of experts, the number of calls and the fall of the gate weights are those of models people use, so *which* calls
#   are heavy, how many misses a cache leaves and how rules for them rank can be asked here.
# - **Sizes do not carry over.** How much a missed expert costs depends on the depth, on the width of an expert, and on
#   how long the model was trained: experts of an older model have grown apart further. Percentages of perplexity found
#   here are this model's own.
# - **Locality carries over only in part.** Neighbouring tokens share {{locality}} experts than in the public models, so
#   at an equal share of slots the same policy meets other misses. Comparisons are therefore also made at an equal *hit
#   rate*, {{target:.1%}}.
# - One training seed and one mixture of texts. The intervals hold the sampling of held-out clusters, not that of models.
