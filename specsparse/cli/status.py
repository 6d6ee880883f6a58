"""Say which kernels run here and why, and what this machine is."""

import argparse
import json
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--bandwidth", action="store_true", help="measure how fast this machine reads memory (0.2 s)")


def main(args: argparse.Namespace) -> int:
    from specsparse import kernels  # after the arguments: JAX takes a second
    from specsparse.kernels.processor import cpu_info
    from specsparse.measure import manifest
    from specsparse.measure.machine import read_bandwidth
    from specsparse.support.files import package_dir, package_line

    cpu, native, versions = cpu_info(), kernels.status(), manifest.package_versions()
    facts: dict[str, Any] = {"cpu": cpu, "kernels": native, "packages": versions, "package": str(package_dir())}
    if args.bandwidth:
        facts["read_bandwidth"] = read_bandwidth()
    if args.json:
        print(json.dumps(facts))
        return 0
    print(f"package   {package_line()}")
    print(f"cpu       {cpu['model']}, {cpu['cores']} cores, {' '.join(cpu['flags']) or cpu['architecture']}")
    print("kernels   " + ", ".join(f"{k}={v}" for k, v in native.items()))
    print("packages  " + ", ".join(f"{k} {v}" for k, v in versions.items()))
    if args.bandwidth:
        print(f"memory    {facts['read_bandwidth'] / 1e9:.1f} GB/s read")
    return 0
