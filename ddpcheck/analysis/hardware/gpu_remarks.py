"""What somebody should look at on a GPU: lost, held down, failing memory, a link that is narrower than it could be."""

from __future__ import annotations

from ddpcheck.analysis.hardware.facts import GpuFacts
from ddpcheck.analysis.hardware.statistics import GpuTally

# Samples of a GPU at work before its PCIe generation is judged: the link takes a moment to wake up.
_FEWEST_AT_WORK = 4


def remarks_on(facts: GpuFacts, tally: GpuTally) -> list[str]:
    """In words, without the GPU's name; most GPUs have none."""
    lost = [f"lost ({tally.lost})"] if tally.lost else []
    held = [f"{reason} in {100 * share:.0f} % of the samples" for reason, share in tally.throttling().items()]
    cut = [f"cut in {len(facts.mig)} MIG slices"] if facts.mig else []
    return lost + held + _memory_errors(tally) + _narrow(facts, tally) + cut


def _memory_errors(tally: GpuTally) -> list[str]:
    """Only those that came while the job ran."""
    kinds = zip(("corrected", "uncorrected"), tally.last.ecc, strict=False)
    return [f"{count} {kind} memory error{'s' if count > 1 else ''}" for kind, count in kinds if count]


def _narrow(facts: GpuFacts, tally: GpuTally) -> list[str]:
    if len(facts.pcie) != 2:
        return []
    generation, width = facts.pcie
    found = []
    if len(tally.last.pcie_link) == 2 and tally.last.pcie_link[1] < width:
        # The generation sinks when the link is idle; the width does not.
        found.append(f"PCIe runs x{tally.last.pcie_link[1]} of x{width}")
    if tally.at_work >= _FEWEST_AT_WORK and tally.generation < generation:
        found.append(f"PCIe runs at generation {tally.generation} of {generation} under load")
    return found
