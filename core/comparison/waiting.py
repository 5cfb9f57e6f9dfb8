"""What a time line tells of stages: for how long they compute nothing."""

from __future__ import annotations

from collections.abc import Sequence

from isotrain.core.comparison.records import Span
from isotrain.core.stages.schedules import PipelineShape, pipeline_bubble

_FORWARD = "forward"
_PASSES = (_FORWARD, "backward")
_BETWEEN = ("send", "wait")
_WAITING = (
    "stages compute no pass for {share:.0%} of the time that those of a typical step take;"
    " (p - 1) / (v m + p - 1) predicts {predicted:.0%}, where all take equally long and sending takes nothing"
)


def idle_notes(timeline: Sequence[Span], replicas: int) -> list[str]:
    """The share of their passes' time in which stages compute none, and what is predicted.

    Args:
        timeline: Of a typical step; of what has no stages nothing is told.
        replicas: Whose stages these are.
    """
    taken = [span for span in timeline if span.name in (*_PASSES, *_BETWEEN)]
    if not taken:
        return []
    tracks = [[s for s in taken if s.track == track] for track in {span.track for span in taken}]
    length = max(own[-1].start_s + own[-1].seconds - own[0].start_s for own in tracks)
    busy = sum(span.seconds for span in taken if span.name in _PASSES)
    forward = max(sum(span.name == _FORWARD for span in own) for own in tracks)
    shape = PipelineShape(len(tracks) // replicas, forward)
    share = 1 - busy / length / len(tracks)
    return [_WAITING.format(share=share, predicted=pipeline_bubble(shape))]
