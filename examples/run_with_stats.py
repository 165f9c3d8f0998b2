"""Run any Python script unchanged and, when it ends, write which attention kernels ran as JSON.

    TORCH_FLASHBACKEND=1 python examples/run_with_stats.py stats.json your_script.py --its --arguments

The script runs as `__main__` in this process; only the counts are read afterwards. The file holds null if the plugin
was never switched on.
"""

import json
import runpy
import sys
from pathlib import Path


def collect() -> dict | None:
    """What this process has counted, ready for JSON, or None when the plugin was never switched on."""
    if "torch_flashbackend.override" not in sys.modules:
        return None
    import torch_flashbackend

    stats = torch_flashbackend.stats()
    return {**stats, "text": str(stats)}


def main(argv: list[str]) -> None:
    """Run `argv[1]` with the arguments after it; write the counts to `argv[0]`, also when the script raises."""
    if len(argv) < 2:
        raise SystemExit("usage: run_with_stats.py STATS.json SCRIPT [ARGUMENTS...]")
    out, script = Path(argv[0]), argv[1]
    sys.argv = argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        out.write_text(json.dumps(collect(), indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
