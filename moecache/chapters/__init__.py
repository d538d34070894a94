"""Chapters: notebooks that ask one question each, and the machinery that turns them into a book.

A chapter is a plain Python file with cells. It is run with the parameters of a profile, *assembled* (its
numbers are written into its prose, a box says how to rerun it, another where its numbers come from) and
rendered. The three names here are all that a chapter itself needs.
"""

from moecache.chapters.display import show, show_table, values

__all__ = ["show", "show_table", "values"]
