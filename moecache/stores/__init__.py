"""Where experts lie: a checkpoint as downloaded, a packed file, main memory, and what stands between them.

Every place hands out the same thing, one expert's block of bytes, and counts what it read (`blocks` says what that is; `store` opens a
place by its path). Nothing here knows a policy or a slot.
"""
