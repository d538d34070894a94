# %% [markdown]
# # Does a model that writes still agree with itself?
#
# Every other chapter scores given texts. Here the model *writes*: each token it chooses becomes its next input, so one substituted expert
# can send the rest of an answer another way. How far does an answer agree with the exact model's, is it still right, and does the
# substituted gate mass tell: from policy to policy, and from problem to problem?

# %% [markdown]
# ## What we expect
#
# A published study found that agreement follows mass only partly: the relation held for one kind of task and failed for another, and it
# failed problem by problem. Across policies we expect order: more mass, less agreement. Problem by problem there is little to expect,
# since an answer turns at *one* close decision, and whether such a decision occurs is a property of the problem, not of the mass.
#
# **Planned** before the full run, each kind of task apart ([the plan](../decisions/plan_12.md)): the coefficient across policies
# (*follows* if its interval lies below -0.7), the coefficient across problems within a policy (*says nothing* if the interval of the mean
# lies within ±0.3), and right answers against the exact model's, problem by problem. Everything else here is exploratory.

# %% tags=["parameters"]
model_names = ["reference-512"]  # reference models
resident_fraction = 0.25  # share of a layer's experts that is resident
num_problems = 20  # scored problems of each kind, from held-out templates
num_warmup_problems = 2  # problems of each kind answered first and not scored
other_fractions = []  # further capacities, exploratory
early_model_name = ""  # an earlier age of the first model, to be set beside it; empty leaves it out
is_admission_shown = False  # also let every substituted expert be admitted anyway, exploratory
problems_file = ""  # path of a GSM8K or HumanEval file of JSON lines; empty: none is read
checkpoint = ""  # folder of a checkpoint that answers that file; empty: the first reference model
num_file_problems = 20  # scored problems of that file
num_file_warmup_problems = 2  # problems of that file answered first and not scored
max_file_tokens = 256  # most tokens of an answer to that file

# %%
import pandas as pd

from moecache import chapters, claims
from moecache.experiments import generation, generation_files
from moecache.experiments import generation_report as report
from moecache.figures import generation as figures
from moecache.reference.settings import MODELS_FOLDER

asked = (num_problems, num_warmup_problems)

# %% [markdown]
# ## Measure
#
# {{model}} with {{slots}} experts resident a layer answers {{num_problems_word_problems}} word problems
# ({{num_templates_word_problems}} templates) and {{num_problems_interpreter}} interpreter lines ({{num_templates_interpreter}}
# templates), none of whose templates it was trained on, in turns. A prompt holds three solved problems of the template. Every miss in a
# prompt is waited for; from the first written token on the policy decides, and the cache is kept from problem to problem. Decoding is
# greedy, so the exact model's answer is one text. The first token of an answer is decided by the prompt alone and is not counted.
#
# {{num_listed}} policies of {{num_families}} families, fixed beforehand, lie between the cheapest threshold and substituting every
# miss; the two chosen policies stand beside them.

# %%
frames = [generation.rows(name, resident_fraction, generation.STAYS_OUT, *asked) for name in model_names]
frame = pd.concat(frames, ignore_index=True)
elsewhere = [(fraction, generation.STAYS_OUT) for fraction in other_fractions]
elsewhere += [(resident_fraction, generation.ADMITTED)] if is_admission_shown else []
others = [generation.rows(name, *setting, *asked, generation.ELSEWHERE_EXPERIMENT) for setting in elsewhere for name in model_names]
rows = report.settings(frame)[0][1]
tests = report.accuracy_tests(rows)
verdict = claims.verdict_on("k", frame)
chapters.values(accuracy=report.accuracy_words(tests), verdict_k=str(verdict.state), evidence_k=verdict.evidence, **report.values(rows))
titles = {kind: report.words_of(kind) for kind in report.kinds(rows)}

# %% [markdown]
# ## Agreement by mass
#
# Each point is a policy of {{model}}; bars are 95 % intervals over problems. Agreement is the share of the exact answer that was written
# before the first difference.

# %% tags=["hide-input"]
points = report.points(rows)
chapters.show(
    figures.agreement_by_mass(points[points["family"] != report.EXACT], titles),
    alt="Agreement with the exact answer against substituted gate mass, one point a policy, a panel for each kind of task.",
)

# %% [markdown]
# *Over the whole*: places that hold the same token, as a share of the longer answer. *Right*: answers with the right value.

# %% tags=["hide-input"]
chapters.show_table(report.policy_table(rows), digits=3)

# %% [markdown]
# ## Problem by problem
#
# Within each policy: do the problems with more substituted mass agree less? Spearman's coefficient across problems with its 95 %
# interval; inside the grey band mass says nothing. Policies that agree equally on all problems have no coefficient and no line.

# %% tags=["hide-input"]
by_problem = report.by_problem(rows)
chapters.show(
    figures.mass_by_problem(by_problem, titles, weak=0.3),
    alt="Coefficient of mass and agreement across problems for each policy, a panel for each kind of task, with a band around zero.",
)

# %% [markdown]
# ## Test
#
# The unit is the problem. Policies are a fixed list, so no p-value is given over them. *Smallest detectable*: what this sample would
# have shown in 80 % of cases. Where templates are drawn instead, problems of one template stay together.

# %% tags=["hide-input"]
found = [report.relations(one).assign(model=key[0]) for key, one in report.settings(frame)]
relations = pd.concat(found, ignore_index=True)
shown = pd.concat([relations[["model"]], report.stats.shown(relations).drop(columns=["test", "effect size"])], axis=1)
chapters.show_table(shown, digits=3)

# %% [markdown]
# Right answers of the exact model minus those of the policy, of {{model}}: McNemar's exact test, Holm's correction over the policies of
# a kind. *Lost* and *won* are problems that only the exact model, or only the policy, solves.

# %% tags=["hide-input"]
if tests is not None:
    chapters.show_table(report.stats.shown(tests).drop(columns=["effect size"]), digits=3)

# %% [markdown]
# ## Elsewhere
#
# Other capacities, and every substituted expert admitted anyway, are exploratory; the table is empty where none was asked for.

# %% tags=["hide-input"]
parts = (
    [
        report.relations(one).assign(setting=f"{model}, {slots} slots, {regime.replace('_', ' ')}", status="exploratory")
        for (model, regime, slots), one in report.settings(pd.concat(others, ignore_index=True))
    ]
    if others
    else []
)
if parts:
    table = pd.concat(parts, ignore_index=True)
    chapters.show_table(pd.concat([table[["setting"]], report.stats.shown(table).iloc[:, :3]], axis=1), digits=3)

# %% [markdown]
# {{two_ages}}

# %% tags=["hide-input"]
if early_model_name:
    early = generation.rows(early_model_name, resident_fraction, generation.STAYS_OUT, *asked, generation.ELSEWHERE_EXPERIMENT)
    chapters.show_table(report.right_at_ages({early_model_name: early, model_names[0]: rows}))
    chapters.values(two_ages="Percentages belong to an age. Right answers of the model and of an earlier age of it (exploratory):")
else:
    chapters.values(two_ages="An earlier age of the model was not read for this page.")

# %% [markdown]
# ## Your own problems and your own model
#
# The same measurement takes a file of GSM8K or HumanEval and the folder of any checkpoint whose family is understood:
# `moecache run 12 -p problems_file gsm8k_test.jsonl -p checkpoint path/to/model`. The model is loaded whole, every expert in memory.
# Programs that it writes run in a process of their own, with limits on time and memory. {{file_words}}

# %% tags=["hide-input"]
if problems_file:
    folder = checkpoint or str(MODELS_FOLDER / model_names[0])
    sizes = (num_file_problems, num_file_warmup_problems, max_file_tokens)
    file_frame = generation_files.file_rows(problems_file, folder, resident_fraction, *sizes)
    chapters.values(file_words=report.file_words(file_frame))
    chapters.show_table(report.policy_table(file_frame), digits=3)
else:
    chapters.values(file_words="No file was given for this page.")

# %% [markdown]
# ## What it means
#
# **Word problems.** The exact model solves {{exact_right_word_problems:.0%}} of them in {{num_exact_word_problems:.0f}} tokens. Half of
# the policies agree with it over at least {{median_agreement_word_problems:.1%}} of the answer; the worst, *{{worst_word_problems}}*,
# over {{worst_agreement_word_problems:.1%}}, and is right in {{worst_right_word_problems:.0%}}. Across {{across_word_problems}}:
# agreement {{follows_word_problems}}. Problem by problem {{within_word_problems}}: mass {{nothing_word_problems}}.
#
# **Interpreter lines.** The exact model solves {{exact_right_interpreter:.0%}} in {{num_exact_interpreter:.0f}} tokens. Half of the
# policies agree over at least {{median_agreement_interpreter:.1%}}; the worst, *{{worst_interpreter}}*, over
# {{worst_agreement_interpreter:.1%}}, and is right in {{worst_right_interpreter:.0%}}. Across {{across_interpreter}}: agreement
# {{follows_interpreter}}. Problem by problem {{within_interpreter}}: mass {{nothing_interpreter}}.
#
# {{accuracy}}
#
# Claim *generation follows mass only partly* (k, [all claims](../claims.md)): **{{verdict_k}}** ({{evidence_k}}).
#
# ## What it does not mean
#
# Policies that agree in full are tied, whatever their mass, and ties pull a coefficient towards zero: where most policies are at that
# ceiling, "does not follow" says that mass does not order them, not that heavy substitution is harmless.
# Answers here are short and their form is rigid: most tokens are decided by a wide margin, and an answer has few places at which to turn.
# Long free answers turn sooner. A prompt whose misses are all waited for leaves the cache ready for its topic, so a short answer after a
# long prompt meets fewer misses than a long text does. A right answer needs no agreement: another text may hold the same value.
# Intervals carry the drawing of problems, not that of training seeds or of other templates, and a model of this size says nothing about
# what a large one would write.
