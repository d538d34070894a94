"""What rules cost at an earlier age of the model, for pages whose percentages come from its final age only.

The earlier age was read in chapter 10, with the same documents; other pages quote it, so that no percentage stands alone. Nothing is
measured here.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from moecache import claims, stats

EXPERIMENT = "10_exploratory_models"
EARLY = "-early"  # ends the name of a model's earlier age


def ages_words(policies: Sequence[str]) -> str:
    """Perplexity increases of policies at the earlier age in a sentence; says so where nothing is stored."""
    return words_of(claims.stored_frame(EXPERIMENT)[0], policies)


def words_of(frame: pd.DataFrame, policies: Sequence[str]) -> str:
    """The sentence from chapter 10's rows of further models.

    Parameters
    ----------
    frame : DataFrame
        A row per model, policy and document; may be empty.
    policies : labels; those that were not read are left out.
    """
    early = frame[frame["model"].str.endswith(EARLY) & frame["policy"].isin(list(policies))] if len(frame) else frame
    if early.empty:
        return "An earlier age of the model was not read."
    table = stats.perplexity_increases(pd.DataFrame(early), unit="cluster").set_index("policy")
    told = [
        f"{100 * row['increase']:.2f} % [{100 * row['low']:.2f}, {100 * row['high']:.2f}] for *{policy}*"
        for policy, row in ((policy, table.loc[policy]) for policy in policies if policy in table.index)
    ]
    model, slots = early["model"].iloc[0], int(early["num_slots"].iloc[0])
    return (
        f"Percentages belong to an age: in {model}, an earlier age of the same model, the increase is {', '.join(told)} "
        f"({slots} slots, n = {int(table['num_units'].iloc[0])} clusters; [chapter 10](10_the_chosen_policies.ipynb))."
    )
