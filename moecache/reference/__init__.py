"""The reference models: small language models with learnt routing, and everything that they are made from.

What a user of the study needs is three functions: `load_model`, `load_tokenizer`, `held_out_documents`. The rest makes
them again, in this order: texts from pinned packages (`packages`, `sources`, `duplicates`, `texts`) and from generators
(`tasks`, `word_problems`, `interpreter_lines`), a tokenizer (`tokenizer`), training (`settings`, `corpus`, `network`,
`train`, `checkpoint`, and `fast` with the library's parts that a faster step exchanges), evaluation and export
(`evaluate`, `answers`, `export`, `card`), and recorded traces (`traces`). On the command line:
`python -m moecache.reference --help`.

Importing this package loads neither torch nor transformers.
"""

from moecache.reference.held_out import Document, held_out_documents
from moecache.reference.loading import MissingModelError, load_model, load_tokenizer
from moecache.reference.packages import TextsError

__all__ = ["Document", "MissingModelError", "TextsError", "held_out_documents", "load_model", "load_tokenizer"]
