"""What several commands share: settings as command-line options, and the run folder that the user refers to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from ddpcheck.cli.project_settings import project_settings
from ddpcheck.config import Config, Option, environment_variable, flags, options
from ddpcheck.errors import RunNotFound, UsageError
from ddpcheck.records.reader import RUNS_FOLDER, is_run_folder
from ddpcheck.reports.outputs import Outputs

OUTPUT_OPTIONS = ("html", "junit", "markdown", "github", "tensorboard")
Command = TypeVar("Command", bound=Callable[..., None])


def with_options(*names: str) -> Callable[[Command], Command]:
    """Replace `**settings` of a command by one option for each of these settings; without names, for all."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        # Settings of a run may come from the environment; a report of a stored run writes what its command line says.
        generated = [
            _parameter(name, declared, from_environment=not names)
            for name, declared in options()
            if not names or name in names
        ]
        # Typer reads the options from the signature.
        command.__signature__ = signature.replace(parameters=[*own, *generated])  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(name: str, declared: Option, from_environment: bool) -> inspect.Parameter:
    [default] = [each.default for each in fields(Config) if each.name == name]
    kind = Literal[declared.choices] if declared.choices else get_type_hints(Config)[name]
    info = typer.Option(
        *flags(name, declared),
        help=declared.help,
        metavar=declared.metavar,
        min=declared.min,
        max=declared.max,
        show_default=declared.show_default,
        rich_help_panel=declared.group or None,
        envvar=environment_variable(name, declared) if from_environment else None,
        # One line below the options states the rule, instead of one name behind each.
        show_envvar=False,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def requested_outputs(config: Config, tensorboard_folder: Path | None = None) -> Outputs:
    """The report files that were requested. Fails now, not after the job, if TensorBoard is missing."""
    if config.tensorboard:
        from ddpcheck.reports.outputs import require_tensorboard

        require_tensorboard()
    return Outputs(
        html=config.html,
        junit=config.junit,
        markdown=config.markdown,
        json=config.json_copy,
        github=config.github,
        fail_on=config.fail_on,
        allow_incomplete=config.allow_incomplete,
        tensorboard=str(tensorboard_folder or "") if config.tensorboard else None,
    )


class OptionalHtmlCommand(TyperCommand):
    """A command with the settings of a run: options in groups, and `--html [FILE]`.

    click has no option with an optional value before an argument.
    """

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Options that are neither on the command line nor in the environment come from pyproject.toml."""
        if self._starts_a_run():
            extra["default_map"] = dict(project_settings().options)
        return super().make_context(info_name, args, parent, **extra)

    def _starts_a_run(self) -> bool:
        return any(each.envvar for each in self.params)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is not None and each.param_type_name == "option":
                groups.setdefault(getattr(each, "rich_help_panel", None) or "Options", []).append(record)
        # Those without a group come last, with the help itself.
        for title in sorted(groups, key=lambda title: title == "Options"):
            with formatter.section(title):
                formatter.write_dl(groups[title])
        if not self._starts_a_run():
            return
        with formatter.section("Settings"):
            formatter.write_text(
                "Each option can also be set by a variable (--fail-on: DDPCHECK_FAIL_ON) or in pyproject.toml "
                "([tool.ddpcheck], fail-on). The command line comes first, then the variable."
            )

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._check_values(args)
        return super().parse_args(ctx, with_html_value(args))

    def _check_values(self, arguments: list[str]) -> None:
        """click would take the dashes before the job's command for the value of the option before them."""
        before = arguments[: arguments.index("--")] if "--" in arguments else []
        last = before[-1] if before else ""
        valued = {flag for each in self.params if not getattr(each, "is_flag", True) for flag in each.opts}
        if last in valued - {"--html"}:
            raise UsageError(
                f"{last} needs a value before the two dashes; `ddpcheck {self.name} --help` describes it"
            )


def with_html_value(arguments: list[str]) -> list[str]:
    """Give a bare `--html` an empty value, unless its file follows it.

    A word before the two dashes can only be the file. Without dashes, it is the file if it ends like one.
    """
    words: list[str] = []
    dashes = arguments.index("--") if "--" in arguments else None
    for index, word in enumerate(arguments):
        # The rest belongs to the job.
        if word == "--":
            return words + arguments[index:]
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        is_file = following.endswith((".html", ".htm")) or (
            dashes is not None and index + 1 < dashes and not following.startswith("-")
        )
        words.append("--html=" if word == "--html" and not is_file else word)
    return words


_MAX_LISTED = 5


def find_run(given: str | None, runs: Path = Path(RUNS_FOLDER)) -> Path:
    """A run folder given by its path, by its name or a part of it in `runs`, or the latest run there.

    Without `runs` in the working directory, that of the nearest folder above it is used.
    """
    runs = nearest_runs(runs)
    if given is None:
        return _latest(runs)
    if given and is_run_folder(Path(given)):
        return Path(given)
    matches = _named(given, runs)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(
            f"{given!r} matches {len(matches)} runs in {runs}: {_listed(matches)}; give more of the name"
        )
    if given and Path(given).exists():
        raise RunNotFound(f"{given!r} is not a run folder: it contains neither run.json nor rank-*.jsonl")
    raise RunNotFound(f"there is no run {given!r}, neither as a folder nor in {runs}{_available(runs)}")


def nearest_runs(runs: Path = Path(RUNS_FOLDER)) -> Path:
    """The folder with runs, here or in a folder above; `runs` itself if there is none."""
    if runs.is_absolute() or runs.is_dir():
        return runs
    above = (parent / runs for parent in Path.cwd().parents)
    return next((folder for folder in above if folder.is_dir()), runs)


def _latest(runs: Path) -> Path:
    matches = _all(runs)
    if not matches:
        raise RunNotFound(
            f"there is no run in {runs}; create one with `ddpcheck run -- COMMAND`, or give a run folder"
        )
    return matches[-1]


def _named(given: str, runs: Path) -> list[Path]:
    if not given:
        return []
    all_runs = _all(runs)
    # Folder names begin with the time; users remember the name that follows.
    exact = [run for run in all_runs if given == run.name or run.name.endswith(f"-{given}")]
    beginning = [run for run in all_runs if run.name.startswith(given)]
    return exact or beginning or [run for run in all_runs if given in run.name]


def _all(runs: Path) -> list[Path]:
    """Oldest first: names begin with the time they started."""
    return sorted((path for path in runs.glob("*") if is_run_folder(path)), key=lambda path: path.name)


def _available(runs: Path) -> str:
    matches = _all(runs)
    return f", which contains {_listed(matches)}" if matches else ""


def _listed(matches: list[Path]) -> str:
    latest = [path.name for path in reversed(matches)][:_MAX_LISTED]
    more = len(matches) - len(latest)
    return ", ".join(latest) + (f" and {more} more" if more else "")
