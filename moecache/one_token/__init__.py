"""One token at one layer a call: the path of decoding, which must cost less than what it decides.

The general path takes any number of tokens in arrays as they come. For a single step, making those arrays takes longer than the step; here
they are made once and written into, and the same kernel decides on them.

- ``parts``: the arrays of one step, and how compiled code finds them again by an address,
- ``compiled``: what a router said is sorted and decided, in compiled calls that take addresses,
- ``decider``: `OneToken`, which Python talks to,
- ``routing``: `OneRow`, from a model's router to the decider and back; the only one that knows torch, so it is imported by its own name.
"""

from moecache.one_token.decider import OneToken

__all__ = ["OneToken"]
