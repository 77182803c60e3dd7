"""Run a function on workers that are processes, for ``launchers.forked``: ``run_function.py FILE WORKERS BACKEND``.

The file holds the function; what ``run_workers`` returns takes its place.
"""

import pickle
import sys
from pathlib import Path

import distdl

if __name__ == "__main__":
    file, workers, backend = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    results = distdl.run_workers(pickle.loads(file.read_bytes()), workers, backend)
    file.write_bytes(pickle.dumps(results))
