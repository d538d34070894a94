"""Experiments: the measuring functions of the chapters, one module a chapter.

Each is pure: parameters in, a tidy DataFrame out. A chapter names the question, asks the result store for the table of the function
here, and shows it; whatever takes more than a few lines to measure stands in this package, where it is typed and tested.

No function here draws, prints or stores anything.
"""
