"""Records how the loss is computed: reduced by a mean or a sum, multiplied by which constants, with which settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ddpcheck.probes.losses.graph import (
    STABLE_STEPS,
    LossTerm,
    function_of,
    is_due,
    loss_terms,
    scaled,
    settings_of,
)
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.records.kinds.state import LossFormRecord, LossSettingsRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

MOST_RECORDS = 32
_MOST_BACKWARDS = 16
_Value = TypeVar("_Value")


class _Stable(Generic[_Value]):
    """A value that counts once it was the same in several steps."""

    def __init__(self, nothing: _Value) -> None:
        self._nothing = self._latest = self.written = nothing
        self.since = 0
        self._repeated = 0
        self.records = 0

    def add(self, step: int, value: _Value, constant: bool = True) -> bool:
        """Whether there is something to write: `written`, since the step `since`."""
        if value != self._latest:
            self._latest, self.since, self._repeated = value, step, 0
        self._repeated += 1
        stable = value if constant and self._repeated >= STABLE_STEPS else self._nothing
        if stable == self.written or self.records >= MOST_RECORDS:
            return False
        if stable == self._nothing and self._repeated > 1:
            return False
        self.written = stable
        self.records += 1
        return True

    @property
    def last(self) -> bool:
        return self.records == MOST_RECORDS


Settings = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


class _Known:
    """What is known of the losses of one optimizer."""

    def __init__(self) -> None:
        self.form: _Stable[tuple[LossTerm, ...]] = _Stable(())
        # By term: the function and its arguments.
        self.settings: _Stable[Settings] = _Stable(())


class LossFormProbe(Probe):
    """Reads the end of the graph: the last operations of the loss, from the root of each outermost backward."""

    name = "loss_form"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._depth = 0
        # As they are, and without the factor of a GradScaler.
        self._terms: list[LossTerm] = []
        self._unscaled: list[LossTerm] = []
        self._settings: list[tuple[str, tuple[tuple[str, Any], ...]]] = []
        self._backwards = 0
        self._due = True
        self._where = ""
        self._known: dict[int, _Known] = {}

    def backward_called(self, root: Any = None) -> None:
        self._depth += 1
        if not self._due or self._depth > 1 or self._backwards >= _MOST_BACKWARDS:
            return
        self._backwards += 1
        if not self._where:
            self._where = user_callsite()
        node = getattr(root, "grad_fn", None)
        terms = loss_terms(node)
        # Micro-batches of a step have the same terms.
        _merge(self._terms, [term.form for term in terms])
        _merge(self._unscaled, [term.form for term in loss_terms(scaled(node))])
        _merge(self._settings, [(function_of(term), tuple(settings_of(term).items())) for term in terms])

    def backward_returned(self) -> None:
        self._depth = max(0, self._depth - 1)

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        self._depth = 0
        if self._due and self._backwards:
            self._add(optimizer)
        self._clear()
        self._due = is_due(optimizer.steps + 1)

    def step_skipped(self, optimizer: TrackedOptimizer) -> None:
        self._clear()

    def _clear(self) -> None:
        self._terms, self._unscaled, self._settings, self._backwards, self._where = [], [], [], 0, ""

    def _add(self, optimizer: TrackedOptimizer) -> None:
        known = self._known.setdefault(optimizer.index, _Known())
        step = optimizer.steps
        form = tuple(self._unscaled if optimizer.scaled else self._terms)
        if known.form.add(step, form, all(term.factor is not None for term in form)):
            self._write_form(optimizer, known.form)
        settings = tuple(self._settings) if any(values for _, values in self._settings) else ()
        if known.settings.add(step, settings):
            self._write_settings(optimizer, known.settings)

    def _write_form(self, optimizer: TrackedOptimizer, form: _Stable[tuple[LossTerm, ...]]) -> None:
        self.context.write(
            LossFormRecord(
                optimizer.index,
                form.since,
                [term.function for term in form.written],
                [term.reduction for term in form.written],
                [float(f"{term.factor or 0.0:.9g}") for term in form.written],
                self._where,
                form.last,
            )
        )

    def _write_settings(self, optimizer: TrackedOptimizer, settings: _Stable[Settings]) -> None:
        self.context.write(
            LossSettingsRecord(
                optimizer.index,
                settings.since,
                [function for function, _ in settings.written],
                [dict(values) for _, values in settings.written],
                self._where,
                settings.last,
            )
        )


def _merge(terms: list[_Value], more: list[_Value]) -> None:
    terms += [term for term in more if term not in terms]
