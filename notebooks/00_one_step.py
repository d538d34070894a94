# %% [markdown]
# # What does the cache do in one step?
#
# A mixture-of-experts layer calls a few of its experts for each token. When an expert is not resident, somebody
# has to decide: wait for it, or let another one stand in. This chapter follows those decisions one by one.

# %% [markdown]
# ## What we expect
#
# Four experts, {{num_slots}} slots, one call a token: small enough to be checked by eye.

# %% tags=["parameters"]
num_slots = 2  # slots a layer
num_tokens = 6  # tokens in the stream

# %%
import matplotlib.pyplot as plt
import pandas as pd

from moecache import chapters, results


# %%
def measure():
    called_ids = [token % 3 for token in range(num_tokens)]
    return pd.DataFrame({"token": range(num_tokens), "expert": called_ids, "is_first": [t < 3 for t in range(num_tokens)]})


stream = results.load_or_run("00_stream", {"num_slots": num_slots, "num_tokens": num_tokens}, measure)
chapters.show_table(stream.frame)

# %%
figure, axes = plt.subplots(figsize=(5, 2))
axes.plot(stream.frame["token"], stream.frame["expert"], "o")
axes.set(xlabel="token", ylabel="expert")
chapters.show(figure, alt="The calls walk through the experts in turn and then start again.")

# %% [markdown]
# The stream has {{num_calls}} calls, {{first_fraction:.0%}} of them to an expert not called before. In symbols,
# $\hat g = \sum_k g_k = 1$. More in the [glossary](../glossary.md).

# %%
chapters.values(num_calls=len(stream.frame), first_fraction=stream.frame["is_first"].mean(), num_slots=num_slots)
