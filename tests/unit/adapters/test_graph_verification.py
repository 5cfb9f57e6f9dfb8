"""Uses at which a captured graph is verified."""

from __future__ import annotations

from isotrain.adapters.torch.graph.captured_graph import PeriodicallyChecked

MANY = 9000


def test_checks_become_rarer_up_to_every_4096_uses() -> None:
    known, at = PeriodicallyChecked(), []
    for known.uses in range(1, MANY + 1):
        if known.uses == known.next_check:
            at.append(known.uses)
            known.pass_checks()
    assert at == [1, 16, 256, 4096, 8192]
    assert (known.next_check, known.last_check) == (12288, 8192)


def test_a_resumed_schedule_continues_from_its_uses() -> None:
    resumed = PeriodicallyChecked(uses=MANY)
    resumed.pass_checks()
    assert (resumed.next_check, resumed.last_check) == (12288, 8192)
