"""Write all pages of the reference to a folder: ``python -m moecache.api_pages FOLDER``."""

import sys
from pathlib import Path

from moecache.api_pages.pages import write_pages

write_pages(Path(sys.argv[1]))
