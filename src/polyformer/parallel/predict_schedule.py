"""How many passes the stages of a process keep at once, by the schedule of their pipeline.

    gpipe           all of a step
    1f1b            one for each stage from this one to the last
    several stages  of each those that the interleaved order has begun, and not yet gone back through

Narayanan et al. 2021, section 2.2.
"""

from collections.abc import Sequence

from polyformer.parallel.config import PipelineSchedule


def most_kept(
    costs: Sequence[int], process: int, processes: int, passes: int, schedule: PipelineSchedule
) -> int:
    """The most bytes that a process keeps at once in a step of `passes` microbatches.

    costs: bytes of one pass, of each of its stages in turn. process: its place among those of the pipeline.
    """
    if schedule == "gpipe":
        return passes * sum(costs)
    if len(costs) == 1:
        return min(processes - process, passes) * costs[0]
    together = passes // max(1, passes // processes)  # microbatches that go through a stage in turn
    warm_up = (len(costs) - 1) * together + 2 * (processes - 1 - process)
    kept = most = 0
    for number in range(len(costs) * passes):
        kept += costs[number // together % len(costs)]
        most = max(most, kept)
        if number >= warm_up:
            kept -= costs[-1 - (number - warm_up) // together % len(costs)]
    return most
