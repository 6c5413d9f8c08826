"""How far apart two sound runs may be: what rounding does to gradients, and how it adds up over steps."""

from __future__ import annotations

from collections.abc import Iterable

# Unit roundoff of the formats in which gradients are computed.
_ROUNDOFF = {
    "float64": 2.0**-53,
    "complex128": 2.0**-53,
    "float32": 2.0**-24,
    "complex64": 2.0**-24,
    "float16": 2.0**-11,
    "complex32": 2.0**-11,
    "bfloat16": 2.0**-8,
}
# Roundings that a gradient may be off by after one step. Sums and depth alone need some dozens; the rest is for
# units that stand at a threshold, where one rounding turns a ReLU on or off and the gradient jumps, and for autocast
# to bfloat16, which no record shows: for float32 this is one rounding of bfloat16. docs/diff.md tells what sound
# jobs were measured at.
_ROUNDINGS = 2.0**16
# Records hold sketches in steps of 2**-26 norms, whatever the dtype.
_RESOLUTION = 2.0**-20
# Beyond this, runs are not the same in any sense, however long they were.
LARGEST = 0.1


class Tolerance:
    """The relative difference that is allowed at a step."""

    def __init__(self, fixed: float | None, dtypes: Iterable[str], half: bool) -> None:
        """`fixed` is what the user asked for; `half`: a GradScaler tells that fp16 is computed in."""
        self._fixed = fixed
        roundoffs = [_ROUNDOFF.get(dtype, 2.0**-8) for dtype in dtypes] + [2.0**-11] * half
        # What a step may add.
        self._a_step = max(_RESOLUTION, _ROUNDINGS * max(roundoffs, default=2.0**-24))

    @property
    def roughly(self) -> float:
        """Within this, a gradient is a multiple of another one, whatever the user allows."""
        return min(LARGEST, self._a_step)

    def at(self, step: int) -> float:
        """It grows with the steps: each adds roundings of its own to parameters that are off already."""
        if self._fixed is not None:
            return self._fixed
        return min(LARGEST, self._a_step * (step + 1))
