"""Checks of the strategies that come with isotrain: what each says that it conserves, equals, and sends."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from conformance import tcp_counters
from conformance.strategy_check_context import RATE, StrategyCheckContext

from isotrain.core.contracts.backend.computations import slice_weights
from isotrain.core.data.batch import Batch
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.session.session import Session
from isotrain.strategies import compressed, gossip, hierarchical, topologies

CLOSE = 1e-11
UNEVEN = 7
"""Samples of a global batch wherever it may have any number: frameworks trace once for each size."""
MARGIN = 0.02
"""How much worse than data-parallel's a loss may be after training; it starts at about 1."""


def close(actual: Any, expected: Any, what: str, within: float = CLOSE) -> None:
    np.testing.assert_allclose(actual, expected, rtol=within, atol=within, err_msg=what)


def apart(rows: np.ndarray) -> float:
    """How far replicas are from each other."""
    return float(np.abs(rows - rows[0]).max())


def equal_data_parallel(context: StrategyCheckContext) -> None:
    """On uneven slices too, weights and moving statistics equal data-parallel ones on every replica.

    Where nothing is traced, the last leaves replicas empty: that each backend takes, its own kit asks.
    """
    batches = context.batches(14 if context.is_traced else 15, UNEVEN)
    expected = context.trained("data-parallel", batches)
    n = context.replicas
    found = {
        "local-sgd": context.trained("local-sgd", batches, every=1),
        "local-sgd after its start": context.trained("local-sgd", batches, every=4, start=99),
        **{
            f"hierarchical {size}": context.trained("hierarchical", batches, host_size=size)
            for size in range(1, n + 1)
            if n % size == 0
        },
        "compressed, all of it": context.trained("compressed", batches, method="topk", ratio=1.0),
    }
    assert apart(expected) == 0
    for what, rows in found.items():
        close(rows, expected, what)
        assert apart(rows) == 0, what


def complete_graph_equals_data_parallel(context: StrategyCheckContext) -> None:
    """Gossip with everybody, on even global batches."""
    batches = context.batches(4 * context.replicas, 2 * context.replicas)
    expected = context.trained("data-parallel", batches)
    close(context.trained("gossip", batches, graph="complete"), expected, "complete graph")


def local_steps_are_averaged_in_time(context: StrategyCheckContext) -> None:
    """Replicas go their own ways for k steps, and then have the mean of where they got."""
    n = context.replicas
    batches = context.batches(9 * n, 3 * n)
    context.restart()
    for batch in batches:
        context.group.local_step(batch, 0.125)
    mean = context.weights().mean(axis=0)
    strategy = context.strategy("local-sgd", every=3)
    context.train(strategy, batches[:2])
    between = context.weights()
    strategy = context.strategy("local-sgd", every=3)
    context.train(strategy, batches)
    close(context.weights(), np.tile(mean, (n, 1)), "mean of the weights")
    assert apart(between) > 1e-4


def evaluation_sees_the_mean(context: StrategyCheckContext) -> None:
    """Replicas hold their mean while they are evaluated, and their own again afterwards."""
    batches = context.batches(2 * context.replicas, 2 * context.replicas)
    for name in ("local-sgd", "gossip"):
        strategy = context.strategy(name, every=9)
        context.train(strategy, batches)
        own = context.weights()
        with strategy.evaluating(context.group):
            seen = context.weights()
        after = context.weights()
        strategy.finished(context.group)
        end = context.weights()
        assert apart(own) > 1e-4
        close(seen, np.tile(own.mean(axis=0), (context.replicas, 1)), name)
        close(after, own, f"{name}, afterwards", 0)
        close(end, seen, f"{name}, at the end")


def the_last_average_is_weighted(context: StrategyCheckContext) -> None:
    """Between averagings too, a replica counts by its samples: here one alone has any."""
    batches = context.batches(1, 1)
    expected = context.trained("data-parallel", batches)
    strategy = context.strategy("local-sgd", every=9)
    context.train(strategy, batches)
    with strategy.evaluating(context.group):
        seen = context.weights()
    strategy.finished(context.group)
    end = context.weights()
    close(seen, expected, "evaluated")
    close(end, expected, "at the end")


def written_weights_are_gone_on_from(context: StrategyCheckContext) -> None:
    """What a strategy kept of the weights before they were set does not come back."""
    batches = context.batches(4 * context.replicas, 2 * context.replicas)
    for name in ("local-sgd", "elastic-averaging"):
        strategy = context.strategy(name, every=1)
        start = context.weights()
        context.train(strategy, batches)
        context.restart()
        strategy.state_written(context.group)
        strategy.finished(context.group)
        close(context.weights(), start, name, 0)


def gossip_mixes_by_its_matrix(context: StrategyCheckContext) -> None:
    """On every graph each replica gets its row of the mixing matrix, and the mean stays."""
    n = context.replicas
    found = []
    for graph in topologies.GRAPHS:
        if (graph == "torus" and n < 4) or (graph == "random" and n < 3):
            continue
        for rounds in topologies.mixings(graph, n, 2, 1):
            context.restart()
            context.group.local_step(context.batches(UNEVEN, UNEVEN)[0], 0.125)
            before = context.weights()
            context.group.compute(gossip.mix, static=rounds)
            found.append((graph, rounds, before, context.weights()))
    for graph, rounds, before, after in found:
        close(after, np.array(topologies.matrix(rounds, n)) @ before, graph)
        close(after.mean(axis=0), before.mean(axis=0), f"{graph}: mean")
        assert apart(before) > 1e-4


def elastic_averaging_follows_its_equations(context: StrategyCheckContext) -> None:
    """Two steps by hand: equations 5 and 6 of the paper; in the end all have the centre, moved once more."""
    n, beta = context.replicas, 0.5
    batches = context.batches(2 * UNEVEN, UNEVEN)
    context.restart()
    track = [context.weights()]
    for batch in batches:
        context.group.local_step(batch, 0.125)
        track.append(context.weights())
    strategy = context.strategy("elastic-averaging", every=1, beta=beta)
    context.train(strategy, batches)
    found = context.weights()
    strategy.finished(context.group)
    end = context.weights()
    weights = slice(0, context.plan.parameters)
    start, one, two = (rows[:, weights] for rows in track)
    close(found[:, weights], two - beta / n * (one - start), "replicas")
    centre = start[0] + beta * (one - start).mean(axis=0)
    centre += beta * (found[:, weights].mean(axis=0) - centre)
    close(end[:, weights], np.tile(centre, (n, 1)), "centre")
    assert apart(end) == 0


def diloco_follows_its_equations(context: StrategyCheckContext) -> None:
    """Outer steps by hand, on uneven slices: algorithm 1 of the paper, with Nesterov momentum.

    Rounding to few bits changes the weights a little, and those of all replicas alike.
    """
    batches = context.batches(3 * UNEVEN, UNEVEN)
    rate, decay, weights = 0.7, 0.5, slice(0, context.plan.parameters)
    context.restart()
    outer = context.weights()[0][weights]
    momentum = np.zeros_like(outer)
    for batch in batches:
        context.group.synchronous_step(batch, RATE)
        gradient = outer - context.weights()[0][weights]
        momentum = decay * momentum + gradient
        outer = outer - rate * (gradient + decay * momentum)
        vectors = [context.group.tensor(outer) for _ in context.group.local_replicas]
        context.group.compute(set_trainable, vectors)
    options = {"outer_rate": rate, "outer_momentum": decay, "every": 1}
    exact = context.trained("diloco", batches, **options)
    close(exact[:, weights], np.tile(outer, (context.replicas, 1)), "outer weights")
    for bits in (8, 4):
        rounded = context.trained("diloco", batches, bits=bits, **options)
        assert apart(rounded) == 0, bits
        assert 0 < np.abs(rounded - exact).max() < 0.3 / 2**bits, bits


STREAMING = {"every": 4, "outer_rate": 0.7, "outer_momentum": 0.5}
STREAMS: tuple[dict[str, Any], ...] = (
    {"fragments": 3},
    {"fragments": 2, "overlap": 3, "mix": 0.25},
)


def streaming_diloco_follows_its_equations(context: StrategyCheckContext) -> None:
    """Exchanges of fragments, at once and some steps later, in NumPy: algorithm 2 of Streaming DiLoCo.

    Replicas have different samples, and some have more of them. At the end exchanges are under way, of a
    fragment whose last step they are of, and of one with further steps.
    """
    batches = context.batches(3 * UNEVEN if context.is_traced else 2 * UNEVEN + 4, UNEVEN)
    of_run = [replace(batches[step % len(batches)], step=step) for step in range(10)]
    weights = slice(0, context.plan.parameters)
    for options in STREAMS:
        between, end = streamed(context, of_run, **STREAMING, **options)
        strategy = context.strategy("diloco", **STREAMING, **options)
        for batch in of_run:
            strategy.step(context.group, batch, RATE)
        found = context.weights()[:, weights]
        close(found, between, f"{options}: replicas", 1e-12)
        assert apart(found) > 1e-4, options
        strategy.finished(context.group)
        found = context.weights()[:, weights]
        close(found, np.tile(end, (context.replicas, 1)), f"{options}: outer weights", 1e-12)


def streamed(
    context: StrategyCheckContext,
    batches: Sequence[Batch],
    every: int,
    outer_rate: float,
    outer_momentum: float,
    fragments: int,
    overlap: int = 0,
    mix: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Local steps of the group, all else in NumPy.

    Returns:
        Weights of every replica after the last step, shape `[replicas, parameters]`; and those that all have
        in the end.
    """
    context.restart()
    length, count = context.plan.parameters, range(fragments)
    parts = [slice(length * f // fragments, length * (f + 1) // fragments) for f in count]
    rows = context.weights()[:, :length]
    outer, momentum = rows[0].copy(), np.zeros(length)
    samples: list[list[np.ndarray]] = [[] for _ in count]
    arriving: list[tuple[int, int, np.ndarray]] = []

    def sent(fragment: int) -> np.ndarray:
        shares = np.mean(samples[fragment], axis=0)
        samples[fragment].clear()
        moved = outer[parts[fragment]] - rows[:, parts[fragment]]
        return np.asarray((shares * moved).mean(axis=0))

    def arrive(fragment: int, gradient: np.ndarray, own: float) -> None:
        part = parts[fragment]
        momentum[part] = outer_momentum * momentum[part] + gradient
        outer[part] -= outer_rate * (gradient + outer_momentum * momentum[part])
        rows[:, part] = own * rows[:, part] + (1 - own) * outer[part]

    for taken, batch in enumerate(batches, 1):
        context.group.local_step(batch, RATE)
        rows = context.weights()[:, :length]
        shares = [np.array([weight]) for weight in slice_weights(batch)]
        shares_of_all = np.stack(context.board.all_gather_rows(shares))
        for fragment in count:
            samples[fragment].append(shares_of_all)
            if taken % every == every * (fragment + 1) // fragments % every:
                arriving.append((taken + overlap, fragment, sent(fragment)))
        for due, fragment, gradient in arriving:
            if due == taken:
                arrive(fragment, gradient, mix)
        arriving = [each for each in arriving if each[0] > taken]
        vectors = [context.group.tensor(rows[each]) for each in context.group.local_replicas]
        context.group.compute(set_trainable, vectors)
    between = rows.copy()
    for _, fragment, gradient in arriving:
        arrive(fragment, gradient, mix if samples[fragment] else 0.0)
    for fragment in count:
        if samples[fragment]:
            arrive(fragment, sent(fragment), 0.0)
    return between, outer


def set_trainable(replica: Any, vector: Any) -> None:
    replica.write(("trainable",), vector)


def gradients_for(context: StrategyCheckContext, replica: int) -> list[np.ndarray]:
    """Gradients of a matrix and a bias, different on each replica."""
    generator = np.random.default_rng(replica)
    return [generator.normal(size=(9, 7)), generator.normal(size=5)]


def compute(
    context: StrategyCheckContext,
    computation: Any,
    given: Callable[[int], list[list[np.ndarray]]],
    static: Any,
) -> list[list[list[np.ndarray]]]:
    """Runs a computation on lists of arrays, and gives for every replica the lists it gave."""
    group = context.group
    local = [given(replica) for replica in group.local_replicas]
    values = [
        [[group.tensor(array) for array in own[place]] for own in local]
        for place in range(len(local[0]))
    ]
    results = group.compute(computation, *values, static=static)
    return [[[group.numpy(t) for t in part] for part in result] for result in results]


def error_feedback_conserves_the_sum(context: StrategyCheckContext) -> None:
    """What all sent plus what all kept is what all had: gradients and what was kept before."""
    n = context.replicas
    ones = np.ones
    cases = {
        "topk": (
            compressed.exchange_top_k,
            lambda r: [gradients_for(context, r), [np.arange(68.0) * r / 40]],
            0.1,
        ),
        "powersgd": (
            compressed.exchange_low_rank,
            lambda r: [gradients_for(context, r), [ones((9, 7)) * r, np.eye(7)[:, :2] + 0.1]],
            2,
        ),
    }
    found = {name: compute(context, *case) for name, case in cases.items()}
    kept = {
        name: context.board.all_gather_rows([state[0].ravel() for _, state in results])
        for name, results in found.items()
    }
    for name, (_, given, _) in cases.items():
        had = sum(flat(given(r)[0])[: len(kept[name][0])] for r in range(n))
        had = had + sum(given(r)[1][0].ravel() for r in range(n))
        mean, _ = found[name][0]
        sent = n * flat(mean)[: len(kept[name][0])]
        close(sent + sum(kept[name]), had, name)
        assert np.abs(sum(kept[name])).max() > 0.1, name
    places = np.count_nonzero(flat(found["topk"][0][0]))
    assert 7 <= places <= 7 * n, places
    assert np.linalg.matrix_rank(found["powersgd"][0][0][0]) == 2
    close(
        found["powersgd"][0][0][1], sum(gradients_for(context, r)[1] for r in range(n)) / n, "bias"
    )


def flat(tensors: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([tensor.ravel() for tensor in tensors])


def short_types_round(context: StrategyCheckContext) -> None:
    """fp16 and bf16 give the mean to their precision, and no better."""
    n = context.replicas
    exact = sum(flat(gradients_for(context, r)) for r in range(n)) / n
    supported = (
        plugin_manager()
        .backend(context.plan.backend)
        .capabilities_for(context.plan.parallel_layout)
        .has
    )
    for method, name, precision in (("fp16", "float16", 2e-3), ("bf16", "bfloat16", 2e-2)):
        needed = plugin_manager().strategy("compressed", {"method": method}).requires
        if needed <= supported:
            results = compute(
                context,
                compressed.exchange_low_precision,
                lambda r: [gradients_for(context, r), []],
                name,
            )
            close(flat(results[0][0]), exact, method, precision)
            assert np.abs(flat(results[0][0]) - exact).max() > precision / 100, method


def converge(context: StrategyCheckContext) -> None:
    """Each strategy ends within a stated margin of where data-parallel ends."""
    batches = context.batches(40, 8)
    given: dict[str, dict[str, Any]] = {
        "data-parallel": {},
        "local-sgd": {"every": 4, "start": 5},
        "gossip": {"graph": "one-peer-exponential"},
        "hierarchical": {},
        "elastic-averaging": {"every": 2},
        "diloco": {"every": 4, "bits": 4, "fragments": 2, "overlap": 1},
        "compressed": {"method": "topk", "ratio": 0.1},
    }
    losses = {}
    for name, options in given.items():
        strategy = context.strategy(name, **options)
        first = context.train(strategy, batches, repeats=5)[0]
        losses[name] = context.evaluation_loss(strategy)
        strategy.finished(context.group)
        assert apart(context.weights()) == 0, f"{name} ends with different weights"
    for loss in losses.values():
        assert loss < losses["data-parallel"] + MARGIN, losses
        assert loss < 0.8 * first, (first, losses)


def measured(context: StrategyCheckContext, work: Callable[[], Any]) -> float:
    """Bytes that a replica sends in it, the mean over all; one call before makes the connections."""
    work()
    context.group.barrier()
    before = tcp_counters.bytes_sent()
    context.board.all_gather({})
    work()
    context.group.barrier()
    sent = np.array([tcp_counters.bytes_sent() - before], dtype=float)
    return float(np.mean(context.board.all_gather_rows([sent])))


Sending = tuple[str, dict[str, Any]]
"""A strategy that exchanges, and its options."""
EXCHANGES: tuple[Sending, ...] = (
    ("local-sgd", {"every": 1}),
    ("gossip", {"graph": "one-peer-exponential"}),
    ("compressed", {"method": "fp16", "native": False}),
    ("compressed", {"method": "topk", "ratio": 0.05}),
)
"""One for each kind of exchange."""
OTHERS: tuple[Sending, ...] = (
    ("local-sgd", {"every": 4}),
    ("elastic-averaging", {"every": 3}),
    ("diloco", {"every": 2, "bits": 8}),
    ("diloco", {"every": 2, "fragments": 2, "overlap": 1}),
    ("compressed", {"method": "powersgd", "rank": 4, "start": 2, "native": False}),
)


def exchanges_send_what_they_say(context: StrategyCheckContext) -> None:
    """Each kind of exchange sends as many bytes as it says, over steps that outweigh Horovod's messages."""
    if context.is_on_the_wire:
        sent_by_each(context, EXCHANGES, 6)


def sends_what_it_says(context: StrategyCheckContext) -> None:
    """Every strategy sends as many bytes as planned, over enough steps for its interval of exchanges."""
    if context.is_on_the_wire:
        in_levels = ("hierarchical", {"host_size": context.replicas // 2})
        found = sent_by_each(context, (*EXCHANGES, *OTHERS, in_levels), 12)
        assert 3.7 < found[0] / found[len(EXCHANGES)] < 4.1, found


def sent_by_each(
    context: StrategyCheckContext, cases: Sequence[Sending], steps: int
) -> list[float]:
    """Bytes sent in a step of each strategy are as planned."""
    n, parameters = context.replicas, context.plan.parameters or 0
    batches = context.batches(UNEVEN, UNEVEN) * steps
    found = []
    for name, options in cases:
        strategy = context.strategy(name, **options)
        context.train(strategy, batches[:2])

        def work(strategy: Any = strategy) -> None:
            for number, batch in enumerate(batches, start=12):
                strategy.step(context.group, replace(batch, step=number), 0.001)

        promised = strategy.exchanged_bytes(parameters * 8, n)
        found.append((f"{name} {options}", measured(context, work) / steps, promised))
    slack = 0.08 * 8 * parameters  # headers, and what keeps the processes in step
    for what, sent, promised in found:
        assert 0.9 * promised < sent < 1.1 * promised + slack, f"{what}: {sent}, not {promised}"
    return [sent for _, sent, _ in found]


def only_the_first_of_a_host_sends_to_others(context: StrategyCheckContext) -> None:
    """Between hosts: an all-reduce of the first replicas, and nothing else."""
    n = context.replicas
    if not context.is_on_the_wire or n < 4:
        return
    size = 40_000
    hosts = ((0, 1), (2, 3))
    values = [[[context.group.tensor(np.ones(size))]]]

    def reduce() -> None:
        context.group.compute(hierarchical.mean_in_levels, *values, static=hosts)

    reduce()
    context.group.barrier()
    before = tcp_counters.sent_to(context.board, n)
    reduce()
    context.group.barrier()
    sent = tcp_counters.sent_to(context.board, n) - before
    rows = np.stack(context.board.all_gather_rows([sent]))
    between = rows[np.ix_((0, 1), (2, 3))] + rows[np.ix_((2, 3), (0, 1))].T
    expected = np.array([[2 * 8 * size, 0], [0, 0]])
    assert np.abs(between - expected).max() < 0.02 * 8 * size, rows


def native_compression(context: StrategyCheckContext) -> None:
    """Native compression sends fewer bytes, and training continues; it is the last check.

    (A backend may be asked once.) fp16 for two replicas, PowerSGD where there are more.
    """
    method: Any = "fp16" if context.replicas == 2 else "powersgd"
    options = {"method": method} | ({} if method == "fp16" else {"start": 2, "rank": 2})
    batches = context.batches(8 * context.replicas, 8 * context.replicas)
    exact = context.trained("data-parallel", batches, repeats=4)
    strategy = context.strategy("compressed", **options)
    context.train(strategy, batches, repeats=4)
    found = context.weights()
    assert apart(found) == 0
    assert 0 < np.abs(found - exact).max() < 0.05
    if context.is_on_the_wire:
        sent = measured(context, lambda: context.train(strategy, batches * 4))
        promised = 4 * (
            strategy.exchanged_bytes((context.plan.parameters or 0) * 8, context.replicas) or 0
        )
        assert 0.9 * promised < sent < 1.1 * promised + 30_000, (sent, promised)


ON_THE_WIRE = (
    "sends_what_it_says",
    "only_the_first_of_a_host_sends_to_others",
    "native_compression",
)
"""The checks that count bytes, of four processes."""
CHECKS = (
    equal_data_parallel,
    complete_graph_equals_data_parallel,
    local_steps_are_averaged_in_time,
    evaluation_sees_the_mean,
    the_last_average_is_weighted,
    written_weights_are_gone_on_from,
    gossip_mixes_by_its_matrix,
    elastic_averaging_follows_its_equations,
    diloco_follows_its_equations,
    streaming_diloco_follows_its_equations,
    error_feedback_conserves_the_sum,
    short_types_round,
    converge,
    exchanges_send_what_they_say,
    sends_what_it_says,
    only_the_first_of_a_host_sends_to_others,
    native_compression,
)
NAMES = tuple(check.__name__ for check in CHECKS)
OF_BACKENDS = (
    "equal_data_parallel",
    "gossip_mixes_by_its_matrix",
    "elastic_averaging_follows_its_equations",
    "diloco_follows_its_equations",
    "streaming_diloco_follows_its_equations",
    "error_feedback_conserves_the_sum",
    "short_types_round",
    "exchanges_send_what_they_say",
    "native_compression",
)
"""Those in which every strategy takes its steps and makes all of its exchanges: a backend may spoil them.

The others are about what a strategy does around its steps, in which no backend has a part of its own.
"""


def run_checks(session: Session, names: Sequence[str] = NAMES) -> dict[str, str]:
    """Makes checks; check name to what is wrong, or an empty text."""
    context = StrategyCheckContext(session)
    return {c.__name__: _failure(c, context) for c in CHECKS if c.__name__ in names}


def _failure(check: Callable[[StrategyCheckContext], None], context: StrategyCheckContext) -> str:
    context.board.all_gather({})
    try:
        check(context)
    except Exception:
        return traceback.format_exc()
    return ""
