"""Print the claims page of the book as Markdown: ``python -m moecache.claims``.

``MOECACHE_VALUES`` may name a JSON file with the values of the chapters being built, by number: only these
are linked.
"""

import json
import os
from pathlib import Path

from moecache.claims.page import page

values = os.environ.get("MOECACHE_VALUES")
print(page(built=None if values is None else set(json.loads(Path(values).read_text()))))
