# SPDX-License-Identifier: Apache-2.0
"""Runs the matrix of models in real engines and says what it found.

    python -m tests.matrix                       # every model: about twenty minutes
    python -m tests.matrix --write LFM2 gpt-oss  # these, into results.json and docs/models.md; other rows stay as found

The exit status is 1 if an answer was wrong, was not restored, or could not have failed, and the model's row does not
say so.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.matrix.rows import ROWS, row
from tests.matrix.run import RowRun
from tests.matrix.table import load, save, show


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in ROWS]
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"one of: {'; '.join(names)} (default: all)")
    parser.add_argument("--write", action="store_true", help="write it into results.json and docs/models.md")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.rows) - set(names))
    if unknown:
        parser.error(f"there is no row {unknown[0]!r}; there are {'; '.join(names)}")
    results, is_good = load(), True
    for name in arguments.rows or names:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="matrix-") as scratch:
            results[name] = RowRun(row(name), Path(scratch)).run()
        if arguments.write:
            save(results)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        for column, cell in results[name].items():
            is_good &= row(name).allows(cell)
            print(f"  {column}: {cell.verdict}{f' ({cell.note})' if cell.note else ''}", flush=True)
    if arguments.write and set(results) == set(names):
        show(results)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
