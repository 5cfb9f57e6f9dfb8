"""Elastic runs: a process goes on in a new process group when another process is lost or joins."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from isotrain.core.contracts.device_mesh import DATA, DeviceMesh
from isotrain.core.contracts.events import Interrupted, Ready, Waiting
from isotrain.core.contracts.membership import Membership
from isotrain.core.contracts.reporter import BETWEEN_CALLS, WAITING_FOR_MEMBERS, WAITING_TO_JOIN
from isotrain.core.errors import EndedError
from isotrain.core.planning.planner import plan_of_members
from isotrain.core.system.periodic import repeated
from isotrain.core.system.process import gc_paused

if TYPE_CHECKING:
    from isotrain.core.contracts.backend.adapter import Adapter
    from isotrain.core.contracts.backend.replica_group import ReplicaGroup
    from isotrain.core.contracts.job import Job
    from isotrain.core.contracts.process import ProcessContext
    from isotrain.core.contracts.reporter import Reporter
    from isotrain.core.data.dataset import DataSet
    from isotrain.core.launching.supervision.handover_folders import HandoverFolders
    from isotrain.core.plugins.resolved_spec import ResolvedSpec
    from isotrain.core.session.checkpointing.handover import CarriedState, StateExchange
    from isotrain.core.session.member_session import MemberSession
    from isotrain.core.spec.training_spec import TrainingSpec

_WATCH_SECONDS = 0.01
_RECORD_BYTES = 1 << 16
"""Bytes for `run.json` and metrics, of which a process that joins knows nothing."""


class ElasticRun:
    """One process's part of an elastic run, over all process groups that it is a member of.

    Where a call fails because another process is lost, this process keeps its state in memory, leaves the
    process group, and waits for the launcher to say who is there. Where another process joins, it does so
    before a step. The members of the new group take the state of the one that has come furthest, and call
    the run's function again, as a resumed run does.

    A process that joins builds its model and loads its data before, so that the others need not wait.
    """

    def __init__(
        self,
        job: Job,
        resolved_spec: ResolvedSpec,
        context: ProcessContext,
        reporter: Reporter,
        blames_peer: Callable[[BaseException], bool],
        lead: Callable[[], None],
        exchange: StateExchange | None,
    ) -> None:
        """Joins nothing yet.

        Args:
            job: The job.
            resolved_spec: The job's spec with its plugin references resolved.
            context: Process context with which this process was started.
            reporter: Sends events to the launcher.
            blames_peer: Whether an error only says that another process is lost.
            lead: Prepares this process for the duties of rank 0, which it takes over.
            exchange: Sends the state to members on other hosts; None: all are on this machine.
        """
        self._job = job
        self._resolved_spec = resolved_spec
        self._adapter: Adapter = resolved_spec.plugins.backend(job.plan.backend)
        self._first_context = context
        self._reporter = reporter
        self._blames_peer = blames_peer
        self._lead = lead
        self._exchange = exchange
        self._folders: HandoverFolders | None = None
        """Folders for states that other members have sent."""
        self._generation = 0
        self._is_frozen = False
        self._carried: CarriedState | None = None
        self._data: DataSet | None = None

    def run(self, take_first: Callable[[], MemberSession] | None = None) -> Any:
        """Calls the job's function in this group and in those that follow; returns its value. Collective.

        Args:
            take_first: Returns the session of the first process group, and keeps no reference to it; None in
                a process that joins.
        """
        try:
            return self._run(take_first)
        finally:
            if self._folders is not None:
                self._folders.close()

    def _run(self, take_first: Callable[[], MemberSession] | None) -> Any:
        session: MemberSession | None = None
        membership: Membership | None = None
        if take_first is None:
            membership = self._wait_to_join()
        else:
            session = self._first_session(take_first)
        while True:
            try:
                with repeated(self._interrupt_void_group, _WATCH_SECONDS, "isotrain-membership"):
                    if membership is not None:
                        session = self._join(membership)
                    assert session is not None
                    value = self._job.work(session)
                    session.close()
                    return value
            except BaseException as error:
                if not self.survives(error):
                    raise
                reason = f"{type(error).__name__}: {error}"
                if session is not None:
                    self._carried = session.carried_state()
            interrupted = self._left_group(reason)
            session = None
            self._abandon_group()
            self._reporter.enter(WAITING_FOR_MEMBERS)
            self._reporter.emit(interrupted)
            membership = self._next_membership()

    def _first_session(self, take: Callable[[], MemberSession]) -> MemberSession:
        session = take()
        session.survives = self.survives
        self._data = session.data
        return session

    def _wait_to_join(self) -> Membership:
        """Builds the model for this process alone, loads the data, and waits to be let in. Local."""
        from isotrain.core.data.identity import data_identity
        from isotrain.core.session.checkpointing.handover import CarriedState
        from isotrain.core.session.training.context import open_group
        from isotrain.core.session.training.dataloaders import load_data

        reporter, resolved_spec, context = self._reporter, self._resolved_spec, self._first_context
        self._carried = CarriedState.none()
        reporter.enter("build model")
        alone = replace(
            context,
            rank=0,
            replicas=1,
            processes=(replace(context.local_process, rank=0),),
            addresses=(context.address,),
            device_mesh=DeviceMesh({DATA: 1}),
        )
        plan = plan_of_members(self._job.plan, resolved_spec, alone.processes)
        with gc_paused():  # it imports the framework
            group = open_group(resolved_spec, plan, alone, None)
        state_bytes = _state_bytes(resolved_spec.spec, group)
        del group
        self._abandon_group()
        reporter.enter("load data")
        self._data = load_data(resolved_spec.spec)
        waiting = Waiting(state_bytes=state_bytes, data=data_identity(self._data))
        reporter.enter(WAITING_TO_JOIN)
        reporter.emit(waiting)
        return self._next_membership()

    def _next_membership(self) -> Membership:
        """Waits for the next process group that this process is a member of."""
        text = self._reporter.wait_for_membership(self._generation)
        membership = Membership.from_bytes(text)
        self._generation = membership.generation
        return membership

    def survives(self, error: BaseException) -> bool:
        """Whether the run goes on in another process group after an error."""
        if isinstance(error, EndedError) or not isinstance(error, Exception):
            return False
        if self._reporter.is_end_requested:  # the others may be gone already
            return False
        if self._blames_peer(error):
            return True
        # An error of the user's own code, between calls of the session, ends the run.
        is_void = self._reporter.is_void(self._generation)
        return is_void and self._reporter.call != BETWEEN_CALLS

    def _left_group(self, reason: str) -> Interrupted:
        assert self._carried is not None  # a session was ready, or this process joins
        return Interrupted(
            generation=self._generation,
            done=self._carried.done,
            phase=self._carried.phase,
            metrics_collected=self._carried.metrics_collected,
            replicas_differ=self._carried.replicas_differ,
            state_bytes=self._carried.nbytes,
            metrics_bytes=self._carried.metrics_nbytes,
            reason=reason,
        )

    def _join(self, membership: Membership) -> MemberSession:
        """Opens a session in a new process group, with the state that was handed over. Collective."""
        from isotrain.core.session.member_session import MemberSession

        reporter, job = self._reporter, self._job
        assert self._carried is not None
        reporter.enter("hand over the state")
        location = self._hand_over(self._carried, membership)
        context = membership.context(self._first_context)
        reporter.rank = context.rank
        if context.rank == 0 and self._first_context.rank != 0:
            self._lead()
        plan = plan_of_members(job.plan, self._resolved_spec, context.processes)
        try:
            session = MemberSession(
                self._resolved_spec,
                plan,
                context,
                reporter,
                resumes=True,
                may_stop=job.may_stop,
                survives=self.survives,
                data=self._data,
            )
            session.take_over(location, membership)
        finally:
            if self._folders is not None:
                self._folders.close()  # other tasks of this host need the room
        reporter.emit(Ready(samples=session.plan.samples))
        return session

    def _hand_over(self, carried: CarriedState, membership: Membership) -> str:
        """Hands the state over; returns its location. Collective."""
        member = self._first_context.rank

        def is_void() -> bool:
            return self._reporter.is_void(membership.generation)

        if membership.folder is not None:
            return carried.hand_over(membership, member, is_void)
        from isotrain.core.launching.supervision.handover_folders import HandoverFolders

        assert self._exchange is not None
        self._folders = folders = self._folders or HandoverFolders()
        return carried.exchange(membership, member, is_void, self._exchange, folders.fill)

    def _abandon_group(self) -> None:
        """Leaves the process group, which no native wrapper of a freed model must outlive. Local.

        What is alive after the first time is there to stay. Later collections, for which the others wait, do
        not traverse it. What is made later may become garbage.
        """
        gc.collect()
        self._adapter.abandon_group()
        if not self._is_frozen:
            gc.freeze()
            self._is_frozen = True

    def _interrupt_void_group(self) -> None:
        """Interrupts the group's calls once the launcher says that it is void. Local; on any thread."""
        if self._reporter.is_void(self._generation):
            self._adapter.interrupt_group()  # again and again: a group may just be forming


def _state_bytes(spec: TrainingSpec, group: ReplicaGroup) -> int:
    """Bytes of what a member hands over, as far as the model tells before the first step. Local."""
    from isotrain.core.session.checkpointing.handover import TENSOR_BYTES
    from isotrain.core.session.training.context import model_bytes

    model = model_bytes(spec, group)
    state, copies = model.replicated, 1 + model.slots
    size = state.weights + state.slots
    if spec.weight_average is not None:
        size, copies = size + state.weights, copies + 1
    names = group.describe_state(("trainable", "non-trainable"))
    return size + copies * sum(2 * len(name) + TENSOR_BYTES for name in names) + _RECORD_BYTES
