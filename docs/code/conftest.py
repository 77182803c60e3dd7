"""Puts this folder on Python's path, so that the tests find the files beside them: ``pytest docs/code``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
