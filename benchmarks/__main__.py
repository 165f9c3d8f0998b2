"""Every benchmark in turn, then the report: `python -m benchmarks [options of harness.parser]`, about 20 minutes.

Each part obeys its own budget and writes its own file in benchmarks/results/. --device, --smoke and --rounds are
handed on; --smoke writes to the folder given by --out instead and leaves README.md alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import attention, decode, overhead, report, special, varlen

PARTS = {
    "attention": attention.main,
    "special": special.main,
    "decode": decode.main,
    "varlen": varlen.main,
    "overhead": overhead.main,
}


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", default="cuda")
    options.add_argument("--smoke", action="store_true", help="tiny shapes: checks the scripts themselves")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--out", type=Path, default=None, help="folder of the results")
    arguments = options.parse_args(argv)
    shared = ["--device", arguments.device, "--rounds", str(arguments.rounds)]
    folder = arguments.out
    if arguments.smoke:
        shared.append("--smoke")
        folder = folder or Path(tempfile.mkdtemp(prefix="flashbackend_smoke_"))
    for name, run in PARTS.items():
        out = [] if folder is None else ["--out", str(folder / f"{name}.json")]
        status = run(shared + out)
        if status:
            return status
    return 0 if folder is not None else report.main([])


if __name__ == "__main__":
    sys.exit(main())
