"""The number of passes in flight in the stages of a process, by the pipeline schedule.

    gpipe           all passes of a step
    1f1b            one for each stage from the current to the last
    several stages  per stage, the passes started in the interleaved order, without a finished backward pass

Narayanan et al. 2021, section 2.2.
"""

from collections.abc import Sequence

from polyformer.training.distributed.config import PipelineSchedule


def peak_activations(
    costs: Sequence[int], process: int, processes: int, passes: int, schedule: PipelineSchedule
) -> int:
    """Return the maximum bytes that a process keeps at once in a step of `passes` microbatches.

    costs: bytes of one pass, for each of its stages in order. process: its rank along the pipeline.
    """
    if schedule == "gpipe":
        return passes * sum(costs)
    if len(costs) == 1:
        return min(processes - process, passes) * costs[0]
    together = passes // max(1, passes // processes)  # consecutive microbatches of one stage
    warm_up = (len(costs) - 1) * together + 2 * (processes - 1 - process)
    kept = most = 0
    for number in range(len(costs) * passes):
        kept += costs[number // together % len(costs)]
        most = max(most, kept)
        if number >= warm_up:
            kept -= costs[-1 - (number - warm_up) // together % len(costs)]
    return most
