"""Runs the benchmarks that are named, or all of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import growth, jasmin, language_models, local_lipschitz, scale, tight_bounds, training
from benchmarks.harness import one_thread

BENCHMARKS = {
    "growth": growth.run,
    "jasmin": jasmin.run,
    "language_models": language_models.run,
    "local_lipschitz": local_lipschitz.run,
    "scale": scale.run,
    "tight_bounds": tight_bounds.run,
    "training": training.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="the smallest size alone; no file is written")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    sys.path.append(str(Path(sys.prefix) / "vision"))  # where `make` puts timm and torchvision
    with one_thread():
        for name in arguments.names or BENCHMARKS:
            BENCHMARKS[name](quick=arguments.quick)


if __name__ == "__main__":
    main()
