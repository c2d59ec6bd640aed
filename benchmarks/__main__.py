"""The command `python -m benchmarks`.

python -m benchmarks                        list the benchmarks
python -m benchmarks NAME --help            the options of one
python -m benchmarks NAME [OPTIONS]         measure; rows are printed and appended to a file
python -m benchmarks report [OPTIONS]       make tables from the rows
python -m benchmarks queue JOBS [OPTIONS]   run a list of commands on this machine's GPUs
"""

from __future__ import annotations

import argparse
import sys

from benchmarks import options, registry


def listing() -> str:
    """Return the text that `python -m benchmarks` prints: one line for each benchmark, with its name and
    summary.
    """
    known = registry.benchmarks()
    width = max(map(len, known))
    lines = [f"  {name:{width}}  {benchmark.summary}" for name, benchmark in known.items()]
    return "\n".join([str(__doc__).strip(), "", "Benchmarks:", *lines])


def make_parser(benchmark: registry.Benchmark) -> argparse.ArgumentParser:
    """Return the command-line parser of one benchmark, with its options; imports the benchmark's module."""
    module = benchmark.load()
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {benchmark.name}", usage="%(prog)s [OPTIONS]",
        description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    module.add_arguments(parser)
    options.add_rows(parser, benchmark)
    return parser


def main(argv: list[str]) -> None:
    """Run the command line of `python -m benchmarks`: list the benchmarks, run one, make tables or run a
    queue. A mistake in the command line ends the process with a message and no traceback.
    """
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        print(listing())
    elif name == "report":
        from benchmarks import report

        report.main(rest)
    elif name == "queue":
        from benchmarks import queue

        queue.main(rest)
    else:
        try:
            benchmark = registry.get(name)
        except registry.UsageError as error:
            sys.exit(f"python -m benchmarks: {error}")
        parser = make_parser(benchmark)
        args = parser.parse_args(rest)
        from benchmarks import run  # after the module, which sets variables that JAX reads

        try:
            run.run(benchmark, args)
        except registry.UsageError as error:
            sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
