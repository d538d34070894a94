"""The API reference of the book: pages written from signatures and docstrings whenever the book is made.

The docstrings of this package are Markdown in numpydoc's order (purpose, Parameters, Returns, Raises, source), so they are read here rather
than by a builder's own extension, which expects another markup. What a page shows is thus what `help()` shows.

- ``docstrings`` takes a docstring apart,
- ``objects`` writes one function, class or constant,
- ``contents`` lists which names stand on which page,
- ``command_line`` writes what ``moecache --help`` says.

``python -m moecache.api_pages FOLDER`` writes all pages. This package knows of no module but by the names in ``contents``.
"""
