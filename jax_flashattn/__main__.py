"""python -m jax_flashattn info | check | bench"""

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_flashattn", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices and compiled kernels")
    check = commands.add_parser("check", help="real text through decoder layers, against float64")
    check.add_argument("--text", help="a UTF-8 file; a text of the package by default")
    check.add_argument("--length", type=int, help="tokens of the longest sequence")
    check.add_argument("--json", help="also write the table to this file")
    bench = commands.add_parser("bench", help="your shapes: ours against jax.nn on this device")

    from jax_flashattn import _bench, _check, _info

    _bench.add_arguments(bench)
    args = parser.parse_args()
    run = {"info": _info.run, "check": _check.run, "bench": _bench.run}[args.command]
    return run(args) or 0


if __name__ == "__main__":
    sys.exit(main())
