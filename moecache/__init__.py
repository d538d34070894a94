"""moecache: which expert misses of a mixture-of-experts model are worth waiting for?"""

__version__ = "0.1.0"
