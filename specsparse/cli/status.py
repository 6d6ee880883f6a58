"""Say which kernels run here and why, and what this machine is."""

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--bandwidth", action="store_true", help="measure how fast this machine reads memory (0.2 s)")


def main(args: argparse.Namespace) -> int:
    """Print the status."""
    from specsparse import kernels  # after the arguments: JAX takes a second
    from specsparse.kernels.processor import cpu_info
    from specsparse.measure import manifest
    from specsparse.measure.machine import read_bandwidth
    from specsparse.support.files import package_dir, package_line

    found = {"cpu": cpu_info(), "kernels": kernels.status(), "packages": manifest.package_versions()}
    found["package"] = str(package_dir())
    if args.bandwidth:
        found["read_bandwidth"] = read_bandwidth()
    if args.json:
        print(json.dumps(found))
        return 0
    cpu = found["cpu"]
    print(f"package   {package_line()}")
    print(f"cpu       {cpu['model']}, {cpu['cores']} cores, {' '.join(cpu['flags']) or cpu['architecture']}")
    print("kernels   " + ", ".join(f"{k}={v}" for k, v in found["kernels"].items()))
    print("packages  " + ", ".join(f"{k} {v}" for k, v in found["packages"].items()))
    if args.bandwidth:
        print(f"memory    {found['read_bandwidth'] / 1e9:.1f} GB/s read")
    return 0
