"""`hetexp report`: compare runs, as a page, as text and as tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hetexp.commands.support.command_line import add_shared, command_parser, exit_code

_EPILOG = """\
examples
  hetexp report outputs/sweeps/2026-01-31/12-00-00-0a1b2c      a sweep; the report goes into its folder
  hetexp report outputs/2026-01-31                             all runs of a day
  hetexp report RUN RUN SWEEP --output comparison --title "Both machines"
  hetexp report SWEEP --wandb --dry-run                        the report that W&B would get"""


def main(arguments: Sequence[str]) -> int:
    """Compare runs, write the files and print the result; return 2 if that is impossible."""
    options = _parser().parse_args(arguments)
    return exit_code(lambda: _run(options), drives_torch=False, trust=options.trust)


def _parser() -> argparse.ArgumentParser:
    from hetexp.report.wandb_report.report import add_arguments

    parser = command_parser(
        "report",
        "Compare runs and sweeps: throughput, efficiency, losses and gains with their confidence "
        "intervals over seeds, as one page that needs no network, as text and as CSV.",
        _EPILOG,
    )
    parser.add_argument(
        "folders", nargs="+", metavar="FOLDER", type=Path, help="run, sweep, or one above them"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder of report.html and its other files; by default FOLDER if it is a single one, "
        "else report",
    )
    parser.add_argument("--title", help="of the report; by default the folders' names")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")
    parser.add_argument(
        "--wandb", action="store_true", help="save a report in W&B instead of these files, and print its URL"
    )
    add_arguments(parser)
    add_shared(parser, "--trust")
    return parser


def _run(options: argparse.Namespace) -> int:
    from hetexp.core.errors import ConfigError, must_be
    from hetexp.core.files import folder_problem
    from hetexp.report.comparison import compare
    from hetexp.report.notes import refused
    from hetexp.report.runs import read_runs

    only_wandb = {"--dry-run": options.dry_run, "--project": options.project, "--entity": options.entity}
    problems = [
        f"`{name}` must be given together with --wandb." for name, value in only_wandb.items() if value
    ]
    if problems and not options.wandb:
        raise ConfigError(problems)
    folder = options.output or (options.folders[0] if len(options.folders) == 1 else Path("report"))
    runs = read_runs(options.folders)
    title = options.title or ", ".join(path.resolve().name for path in options.folders)
    if options.wandb:
        from hetexp.report.wandb_report.report import main_wandb

        main_wandb(compare(runs, title), options)
        return 0
    problem = folder_problem(folder)
    if problem:
        reason = problem[:1].upper() + problem[1:]
        raise ConfigError(must_be("--output", "a folder that can be written", str(folder), reason))
    from hetexp.report.write import IMAGE, TABLES, TEXT, write_files

    comparison = compare(runs, title)
    page = write_files(comparison, folder)
    for problem in refused(comparison):
        print(problem, file=sys.stderr)
    print(comparison.answer)
    print(f"Report: {page}")
    written = [name for name in (IMAGE, TEXT, *TABLES) if (folder / name).exists()]
    print(f"Beside it: {', '.join(written)}")
    if options.open:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
    return 0
