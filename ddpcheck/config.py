"""The settings of one run: every option of `ddpcheck run` is declared here, once.

The command line generates its options from these fields. The launcher adds the run folder and hands the fields that
ranks read to them through one environment variable. Standard library only: ranks import this module.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ddpcheck.errors import UsageError
from ddpcheck.step_ranges import parse_steps

ENV_CONFIG = "DDPCHECK_CONFIG"
# Three steps, after buckets are rebuilt and caches are warm.
DEFAULT_PROFILE_STEPS = "5:8"
# Steps that are checked completely, whatever --budget allows.
FIRST_STEPS_OF_BUDGET = 64
# Values of --keep.
KEEP_SUMMARIES, KEEP_ALL = "summaries", "all"
_OPTION = "option"


@dataclass(frozen=True)
class Option:
    """How a setting appears on the command line, and which values it accepts."""

    help: str
    # The spellings; by default `--field-name`.
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    # The heading of the help under which it is listed.
    group: str = ""
    min: float | None = None
    max: float | None = None
    show_default: bool = True
    # Ranks read it: it is part of the environment variable and of run.json.
    for_ranks: bool = False
    # Raises ValueError with what is wrong and what to give instead.
    check: Callable[[Any], None] | None = None


def option(help: str, **details: Any) -> dict[str, Option]:
    """Metadata of a field that is also a command-line option; `details` are the other fields of `Option`."""
    return {_OPTION: Option(help, **details)}


def _check_name(name: str | None) -> None:
    if name is not None and (not name.strip(".") or not name.isprintable() or "/" in name):
        raise ValueError("not usable in a folder name; use letters, digits and dashes")


def _check_job_id(job_id: str) -> None:
    if job_id and (not job_id.strip("-.") or not job_id.isprintable() or "/" in job_id):
        raise ValueError("not usable as a folder name; use letters, digits and dashes")


def _check_hang_timeout(seconds: float) -> None:
    """Ranks need up to a second to answer a request for their stacks."""
    if not math.isfinite(seconds) or 0 < seconds < 1:
        raise ValueError("give at least 1 second, or 0 to disable the hang detection")


def _check_sample_hz(rate: float) -> None:
    """Samples that are more than ten seconds apart cannot be assigned to steps."""
    if not math.isfinite(rate) or 0 < rate < 0.1:
        raise ValueError("give a rate from 0.1 to 20 Hz, or 0 to disable sampling")


def _check_steps(steps: str) -> None:
    parse_steps(steps)


def _check_budget(budget: str) -> None:
    parse_budget(budget)


def parse_budget(budget: str) -> float | None:
    """The share of a step that ddpcheck may take, from a percentage; None: everything is checked at every step."""
    if budget == "off":
        return None
    try:
        percent = float(budget)
    except ValueError:
        percent = 0.0
    if not 0 < percent <= 100:
        raise ValueError("give a percentage above 0, such as 2, or `off` to check everything at every step")
    return percent / 100


def _check_audit(audit: str) -> None:
    parse_audit(audit)


def parse_audit(audit: str) -> int:
    """Every how many steps local gradients are computed again by other ranks, from `every=N`; 0: never."""
    if not audit:
        return 0
    name, _, number = audit.partition("=")
    if name.strip() != "every" or not number.strip().isdecimal() or int(number) < 1:
        raise ValueError("give the interval as every=N, for example every=100")
    return int(number)


def _check_profile_steps(steps: str) -> None:
    """One range only: starting and stopping the profiler repeatedly costs more than it shows."""
    ranges = parse_steps(steps).ranges
    if steps and (len(ranges) != 1 or ranges[0][1] is None):
        raise ValueError(f"give one range of steps with an end, such as {DEFAULT_PROFILE_STEPS}")


def _check_output_file(path: Path | None) -> None:
    """Reported before the job starts, not after hours of training."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError("this is a folder; give the name of a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}; create it first")


def _check_address(url: str) -> None:
    """Without the URL in the message: it may contain a secret."""
    if url and not url.startswith(("http://", "https://")):
        raise ValueError("the address must begin with http:// or https://")


def _check_page(html: str | None) -> None:
    if html:
        if not html.endswith(".html"):
            raise ValueError("the name must end in .html")
        _check_output_file(Path(html))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of one run. Fields without an option are set by the launcher."""

    # Set by the launcher: the run folder, its id, and the node-local file through which ranks of one node exchange
    # digests (empty: it could not be created).
    run_dir: str = ""
    run_id: str = ""
    exchange_file: str = ""
    # Whether `ddpcheck run` has started the ranks. Otherwise they create the run folder where it is missing.
    own_launcher: bool = True
    # Host and boot of the launcher: a rank on the same machine belongs to it, under any name of its container.
    launcher_host: str = ""
    launcher_boot: str = ""
    # Codes of findings that count as notes, and why, from pyproject.toml.
    ignore: Mapping[str, str] = field(default_factory=dict)

    out: Path | None = field(
        default=None,
        metadata=option("Run folder [default: ddpcheck-runs/<time>-<name>].", metavar="DIR", group="Run"),
    )
    name: str | None = field(
        default=None,
        metadata=option(
            "Name of the run. It becomes part of the folder name.",
            metavar="NAME",
            check=_check_name,
            group="Run",
        ),
    )
    fail_on: str = field(
        default="error",
        metadata=option(
            "Lowest severity that fails the run.", choices=("error", "warning", "never"), group="Verdict"
        ),
    )
    allow_incomplete: bool = field(
        default=False,
        metadata=option(
            "Do not fail a run because trained parameters were not compared, as with full sharding (FSDP) or "
            "DeepSpeed.",
            group="Verdict",
        ),
    )
    fail_fast: bool = field(
        default=False,
        metadata=option(
            "Stop the job at the first step where replicas diverge.", for_ranks=True, group="Verdict"
        ),
    )
    every: int = field(
        default=1,
        metadata=option(
            "Compare parameters after every N steps.", metavar="N", min=1, for_ranks=True, group="Checks"
        ),
    )
    optimizer_state: bool = field(
        default=False,
        metadata=option(
            "Also compare optimizer state, such as momentum buffers.", for_ranks=True, group="Checks"
        ),
    )
    gradients: str = field(
        default="sketch",
        metadata=option(
            "How to check gradients: not at all, by sketches, or by saving all of them.",
            choices=("off", "sketch", "full"),
            for_ranks=True,
            group="Checks",
        ),
    )
    save_gradients: str = field(
        default="",
        metadata=option(
            "Save the full gradients of these steps, for example 0,10:13.",
            metavar="STEPS",
            show_default=False,
            for_ranks=True,
            check=_check_steps,
            group="Checks",
        ),
    )
    sketch_every: int = field(
        default=1,
        metadata=option(
            "After the first 8 steps, check the AllReduce only at every N-th step. Lowers the overhead for models with "
            "many parameters and little compute.",
            metavar="N",
            min=1,
            for_ranks=True,
            group="Checks",
        ),
    )
    budget: str = field(
        default="2",
        metadata=option(
            f"Share of a step that ddpcheck may take. Above it, after the first {FIRST_STEPS_OF_BUDGET} steps, the "
            "AllReduce is verified at fewer steps, then applied gradients and last parameters are compared at fewer "
            "steps. `off`: check everything at every step.",
            metavar="PERCENT",
            for_ranks=True,
            check=_check_budget,
            group="Checks",
        ),
    )
    audit: str = field(
        default="",
        metadata=option(
            "At every N-th step, compute the local gradient of each rank again on two other ranks and compare. Finds "
            "devices that compute wrong values. Costs two forwards and backwards per audited step.",
            metavar="every=N",
            show_default=False,
            for_ranks=True,
            check=_check_audit,
            group="Checks",
        ),
    )
    profile_default_steps: bool = field(
        default=False,
        metadata=option(
            f"Record steps {DEFAULT_PROFILE_STEPS} with torch.profiler and report overlap and waiting times.",
            flags=("--profile",),
            group="Measurements",
        ),
    )
    profile: str = field(
        default="",
        metadata=option(
            "Record steps A up to, but not including, B instead.",
            flags=("--profile-steps",),
            metavar="A:B",
            show_default=False,
            for_ranks=True,
            check=_check_profile_steps,
            group="Measurements",
        ),
    )
    hang_timeout: float = field(
        default=300.0,
        metadata=option(
            "Stop after N seconds without progress (0: never).",
            metavar="N",
            min=0.0,
            for_ranks=True,
            check=_check_hang_timeout,
            group="Verdict",
        ),
    )
    sample_hz: float = field(
        default=2.0,
        metadata=option(
            "Sample GPUs, network interfaces and memory of the node N times per second (0: never).",
            metavar="N",
            min=0.0,
            max=20.0,
            check=_check_sample_hz,
            group="Measurements",
        ),
    )
    keep: str = field(
        default=KEEP_SUMMARIES,
        metadata=option(
            "What to keep of a long job: `summaries` of steps that were compared, and all records at the start, around "
            "findings and at the end (at most 64 MB for each rank); or the records of `all` steps.",
            choices=(KEEP_SUMMARIES, KEEP_ALL),
            for_ranks=True,
            group="Run",
        ),
    )
    html: str | None = field(
        default=None,
        metadata=option(
            "Write an HTML report to FILE (must end in .html), or to report.html in the run folder.",
            metavar="[FILE]",
            show_default=False,
            check=_check_page,
            group="Reports",
        ),
    )
    junit: Path | None = field(
        default=None,
        metadata=option(
            "Write JUnit XML for CI systems.",
            metavar="FILE",
            show_default=False,
            check=_check_output_file,
            group="Reports",
        ),
    )
    markdown: Path | None = field(
        default=None,
        metadata=option(
            "Write the report as Markdown.",
            metavar="FILE",
            show_default=False,
            check=_check_output_file,
            group="Reports",
        ),
    )
    json_copy: Path | None = field(
        default=None,
        metadata=option(
            "Write a copy of report.json to FILE.",
            flags=("--json",),
            metavar="FILE",
            show_default=False,
            check=_check_output_file,
            group="Reports",
        ),
    )
    github: bool = field(
        default=False, metadata=option("Write GitHub Actions annotations and a job summary.", group="Reports")
    )
    tensorboard: bool = field(
        default=False,
        metadata=option("Write a TensorBoard folder. `ddpcheck view` shows it.", group="Reports"),
    )
    prometheus: str = field(
        default="",
        metadata=option(
            "Serve metrics for Prometheus on a port of this machine, or write them to a file that ends in .prom.",
            metavar="[HOST:]PORT|FILE",
            show_default=False,
            group="Monitoring",
        ),
    )
    otlp: str = field(
        default="",
        metadata=option(
            "Send metrics to an OpenTelemetry collector, for example http://localhost:4318/v1/metrics.",
            metavar="URL",
            show_default=False,
            check=_check_address,
            group="Monitoring",
        ),
    )
    wandb: str = field(
        default="",
        metadata=option(
            "Log metrics to this project of Weights & Biases.",
            metavar="PROJECT",
            show_default=False,
            group="Monitoring",
        ),
    )
    mlflow: str = field(
        default="",
        metadata=option(
            "Log metrics to this experiment of MLflow.",
            metavar="EXPERIMENT",
            show_default=False,
            group="Monitoring",
        ),
    )
    notify: str = field(
        default="",
        metadata=option(
            "Post findings and the verdict to this URL, as JSON that Slack understands as well.",
            metavar="URL",
            show_default=False,
            check=_check_address,
            group="Monitoring",
        ),
    )
    job_id: str = field(
        default="",
        metadata=option(
            "Id of the job, the same on all its nodes [default: the id of the rendezvous or the scheduler].",
            flags=("--run-id",),
            metavar="ID",
            show_default=False,
            check=_check_job_id,
            group="Several nodes",
        ),
    )
    wait_nodes: float = field(
        default=60.0,
        metadata=option(
            "At the end, wait up to N seconds for other nodes that use the same run folder.",
            metavar="N",
            min=0.0,
            group="Several nodes",
        ),
    )
    quiet: bool = field(
        default=False,
        metadata=option(
            "Print only the verdict and the next command.", flags=("--quiet", "-q"), group="Terminal"
        ),
    )
    verbose: bool = field(
        default=False,
        metadata=option("Print all tables of the report.", flags=("--verbose", "-v"), group="Terminal"),
    )
    # None: if the terminal supports it.
    live: bool | None = field(
        default=None,
        metadata=option(
            "Show the state of the job in the last lines of the terminal [default: on a terminal].",
            flags=("--live/--no-live",),
            show_default=False,
            group="Terminal",
        ),
    )

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> Config:
        """The settings for the values given on the command line; raises UsageError for one that is not accepted."""
        for name, declared in options():
            if declared.check is not None and name in values:
                try:
                    declared.check(values[name])
                except ValueError as error:
                    given = str(values[name])
                    shown = given if given.isprintable() and given else repr(given)
                    raise UsageError(f"{flags(name, declared)[0]} {shown}: {error}") from None
        settings = dict(values)
        if settings.get("profile_default_steps") and not settings.get("profile"):
            settings["profile"] = DEFAULT_PROFILE_STEPS
        config = cls(**settings)
        if config.quiet and config.verbose:
            raise UsageError("--quiet and --verbose contradict each other; remove one of them")
        if config.save_gradients and config.gradients == "off":
            raise UsageError("--save-gradients does not work with --gradients off; remove one of them")
        if config.audit and config.gradients == "off":
            raise UsageError("--audit does not work with --gradients off; remove one of them")
        return config

    @property
    def listen_seconds(self) -> float:
        """How often a rank checks whether the launcher has requested its stacks."""
        return min(5.0, max(0.1, self.hang_timeout / 20))

    def rank_settings(self) -> dict[str, Any]:
        """What ranks read: goes into the environment variable and into run.json."""
        local = {name for name, declared in options() if not declared.for_ranks}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in local}

    def to_environment(self) -> dict[str, str]:
        return {ENV_CONFIG: json.dumps(self.rank_settings(), separators=(",", ":"))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Config | None:
        """The settings in `environ`, or None if ddpcheck does not check this process.

        Unknown keys are ignored, so that ranks with another version of ddpcheck still report.
        """
        text = environ.get(ENV_CONFIG)
        if not text:
            return None
        raw = json.loads(text)
        known = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in raw.items() if key in known})


def options() -> Iterator[tuple[str, Option]]:
    """Every setting that is a command-line option, in the order of the help."""
    for each in fields(Config):
        declared = each.metadata.get(_OPTION)
        if declared is not None:
            yield each.name, declared


def environment_variable(name: str, declared: Option) -> str:
    """The variable that sets an option, for example DDPCHECK_FAIL_ON."""
    return (
        "DDPCHECK_" + flags(name, declared)[0].partition("/")[0].removeprefix("--").replace("-", "_").upper()
    )


def flags(name: str, declared: Option) -> tuple[str, ...]:
    return declared.flags or ("--" + name.replace("_", "-"),)
