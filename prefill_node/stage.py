"""One stage process of a prefill group: the object graph, and the life of the group as this stage sees it.

stage 0        form -> [ epoch: links, pipeline, session for the coordinator ] -> lost -> drop all -> form ...
later stages   connect, hello -> welcome -> [ epoch: links, pipeline, follow the log ] -> lost -> drop all -> connect ...
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

from prometheus_client import CollectorRegistry

from kvstore.client import StoreClient
from kvstore.layout import KVLayout
from kvstore.node import NodeIdentity, StoreNode
from kvstore.preflight import require_store
from kvstore.transfer.base import Transfer
from model_runner.footprint import check_room, footprint_in_role, free_bytes
from model_runner.model_source import DescribedModel
from model_runner.runner import Runner
from model_runner.stage import StageSpec
from moontide.clock import Clock, MonotonicClock
from moontide.config import to_tree
from moontide.errors import ConfigError, MoontideError, NodeLost, RoleRefused
from moontide.log import get_logger
from moontide.metrics import HealthServer
from moontide.perf_model import StepModel
from moontide.registry import Announcer, NodeRecord
from moontide.roles import SERVICE_NAME as NODE_SERVICE_NAME
from moontide.roles import NodeServicer, RoleSwitch, Successor
from moontide.rpc import Server
from moontide.slow_call import NoAnswerYet, SlowCall
from moontide.tls import Tls
from moontide_proto.v1 import node_pb2_grpc, prefill_pb2_grpc, stage_pb2
from prefill_node.balance import UnevenStages, uneven_stages
from prefill_node.config import PrefillNodeConfig, split_address
from prefill_node.coordinator import Coordinator
from prefill_node.group import FormedGroup, GroupLeader, GroupMember
from prefill_node.link import LinkListener, LinkReceiver, LinkSender
from prefill_node.measured_split import MeasuredSplit
from prefill_node.metrics import GroupMetrics, StageMetrics
from prefill_node.pipeline import Report, StagePipeline, StageThreads
from prefill_node.prefix_copy import Copier
from prefill_node.service import SERVICE_NAME, PrefillServicer
from prefill_node.session import GroupSession

_REJOIN_S = 0.2
"""Pause before a group forms again, so that a stage that cannot work does not spin."""
_REGISTER_TIMEOUT_S = 60.0
"""Longest wait at start for the store service."""
_DRAIN_TIMEOUT_S = 60.0
"""Longest wait for the jobs of an ended epoch; one forward or one batch of puts each."""
_CLOSE_TIMEOUT_S = 20.0
"""Longest wait for these jobs when the stage closes."""
_ALONE_S = 60.0
"""A decode instance that became a stage waits so long for the others, also when one is lost later, and then becomes what it was."""
_STORE_ANSWER_S = 5.0
"""A store that has been asked for so long is a problem; the question goes on."""
_STUCK_S = 300.0
"""With work in the log and no report for so long, a stage hangs although its heart beats."""

log = get_logger(__name__)


class Stage:
    """One stage and, on stage 0, the service of the group."""

    def __init__(
        self,
        config: PrefillNodeConfig,
        described: DescribedModel,
        runner: Runner,
        client: StoreClient,
        *,
        layout: KVLayout,
        split: list[StageSpec],
        measured_split: MeasuredSplit | None = None,
        step_model: StepModel | None,
        transfer: Transfer,
        store_node: StoreNode,
        copier: Copier | None = None,
        tls: Tls | None = None,
        registry: CollectorRegistry,
        health: HealthServer,
        http_address: str,
        clock: Clock | None = None,
        resources: AsyncExitStack | None = None,
    ) -> None:
        """
        Args:
            split: the layers of every stage of the group.
            measured_split: where a better one is kept; None: the split stays.
            step_model: how long this stage takes for a step, if that is known.
            transfer: only its health is asked here.
            copier: has prefixes copied from other hosts; None: nobody has.
            health: listens already, at `http_address`; who gives it closes it.
            resources: what this stage owns beyond its own parts; closed last.
        """
        self._config = config
        self._described = described
        self.switch = RoleSwitch(
            "prefill",
            to_tree(config),
            check=self._check_successor,
            companions=self._companions,
            on_leaving=self._dismiss_others,
        )
        self._runner = runner
        self._client = client
        self._layout = layout
        self._split = split
        self._measured_split = measured_split
        self._step_model = step_model
        self._uneven_stages = ""
        self._transfer = transfer
        self._store_node = store_node
        self._copier = copier
        self._tls = tls
        self._clock: Clock = clock or MonotonicClock()
        self._resources = resources or AsyncExitStack()
        self._boot_id = secrets.token_hex(8)
        self._metrics = StageMetrics(registry)
        self._group_metrics = (
            GroupMetrics(registry, num_stages=config.prefill.num_stages) if config.prefill.stage_idx == 0 else None
        )
        health.not_ready = self.not_ready
        self._threads = StageThreads(torch_threads=config.model.threads)
        self._listener: LinkListener | None = None
        self._leader: GroupLeader | None = None
        self._server: Server | None = None
        self._announcer: Announcer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._pipeline: StagePipeline | None = None
        self._ungrouped = asyncio.Event()
        self._ungrouped.set()
        self._store_problem: str | None = "the store was not asked yet"
        self._store_call = SlowCall(self._ask_store)
        self._store: NodeIdentity | None = None
        self._is_closing = False
        self.coordinator: Coordinator | None = None
        """On stage 0."""
        self.grpc_address = ""
        self.http_address = http_address

    @property
    def is_grouped(self) -> bool:
        """Whether this stage works in a complete group."""
        return not self._ungrouped.is_set()

    def not_ready(self) -> str | None:
        """Why this stage cannot serve now."""
        if self._is_closing:
            return "draining"
        if not self.is_grouped:
            missing = self._leader.missing_stages if self._leader else []
            names = ", ".join(str(idx) for idx in missing)
            return f"prefill group {self._config.prefill.group_id} is not complete" + (
                f": no stage {names}" if names else ""
            )
        return self._store_problem

    async def start(self) -> None:
        """Listen and join the group in the background. Raises: ConfigError, OSError for ports in use; nothing stays open then."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def wait_failed(self) -> None:
        """Raise what ended a background task: the process should end then. Return only when the stage is to change its role."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Leave the registry, let open requests end for up to `grace_s`, close everything. A later stage waits for its group's end."""
        self._is_closing = True
        if grace_s > 0:
            log.info("draining", requests=self.coordinator.num_open if self.coordinator else 0, grace_s=grace_s)
        if self._announcer is not None:
            await self._announcer.close()
        if self._server is not None:
            await self._server.close(grace_s)
        elif grace_s > 0:
            await self._wait_ungrouped(grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._store_call.close()
        if self._leader is not None:
            await self._leader.close()
        if self._listener is not None:
            await self._listener.close()
        # Cancelling the group's task may have cut short its own wait for the threads, and the pages go with the resources.
        await self._threads.close(timeout_s=_CLOSE_TIMEOUT_S)
        await self._resources.aclose()
        log.info("closed")

    async def _start(self) -> None:
        node, prefill = self._config.node, self._config.prefill
        identity = await self._register_layout()
        self._store = identity
        await require_store(self._config.store.master_http, identity.segment, host=node.host)
        await self._check_store()
        hello = self._hello()
        if prefill.stage_idx > 0:
            self._listener = LinkListener(
                from_stage_idx=prefill.stage_idx - 1, handshake_timeout_s=prefill.peer_timeout_s
            )
            hello.link_address = f"{node.host}:{self._listener.start(node.host, prefill.link_port)}"
            self._tasks.append(asyncio.create_task(self._follow(hello), name="group"))
        else:
            await self._start_leader(hello, store_node_id=identity.node_id)
        self._tasks.append(asyncio.create_task(self._watch(), name="watch"))

    async def _register_layout(self) -> NodeIdentity:
        """Tell the store what will be stored; its service may still be on its way up. Raises: ConfigError."""
        try:
            async with asyncio.timeout(_REGISTER_TIMEOUT_S):
                while True:
                    try:
                        return await self._store_node.register_layout(self._layout)
                    except NodeLost as error:
                        log.info("waiting for the store service", reason=str(error))
                        await asyncio.sleep(1.0)
        except TimeoutError as error:
            raise ConfigError(
                f"no store service answers at store.service_address={self._config.store.service_address} within "
                f"{_REGISTER_TIMEOUT_S} s; start `python -m kvstore` on this host, or correct the address"
            ) from error

    async def _start_leader(self, hello: stage_pb2.Hello, *, store_node_id: str) -> None:
        node, prefill = self._config.node, self._config.prefill
        assert self._group_metrics is not None
        self._group_metrics.plan.info(
            {
                "mode": prefill.mode,
                "policy": prefill.policy,
                "chunking": prefill.chunking,
                "attention": self._runner.attention,
            }
        )
        self.coordinator = Coordinator(
            config=prefill,
            info=self._runner.info,
            layout=self._layout,
            client=self._client,
            store_node=self._store_node,
            store_node_id=store_node_id,
            store_address=self._config.store.service_address,
            copier=self._copier,
            clock=self._clock,
            metrics=self._group_metrics,
        )
        self._leader = GroupLeader(
            hello=hello,
            heartbeat_s=prefill.heartbeat_s,
            peer_timeout_s=prefill.peer_timeout_s,
            on_report=self._take_report,
        )
        await self._leader.start(*split_address("prefill.control_address", prefill.control_address))
        self._server = Server(self._tls)
        servicer = PrefillServicer(
            self.coordinator,
            node_id=node.node_id,
            num_stages=prefill.num_stages,
            uneven_stages=lambda: self._uneven_stages,
        )
        self._server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, servicer, SERVICE_NAME)
        self._server.add(node_pb2_grpc.add_NodeServicer_to_server, NodeServicer(self.switch), NODE_SERVICE_NAME)
        self.grpc_address = f"{node.host}:{await self._server.start(node.host, node.grpc_port)}"
        self._announcer = Announcer(self._config.registry, self._record)
        await self._announcer.start()
        self._tasks.append(asyncio.create_task(self._lead(self._leader, self.coordinator), name="group"))

    def _hello(self) -> stage_pb2.Hello:
        assert self._store is not None
        told = stage_pb2.StepModel(**dataclasses.asdict(self._step_model)) if self._step_model else None
        return stage_pb2.Hello(
            stage_idx=self._config.prefill.stage_idx,
            num_stages=self._config.prefill.num_stages,
            boot_id=self._boot_id,
            num_pages=self._runner.kv.num_pages,
            layout_digest=self._layout.digest(),
            hidden_size=self._runner.info.hidden_size,
            step_model=told,
            layer_split=[spec.num_local_layers for spec in self._split],
            store_node_id=self._store.node_id,
            node_id=self._config.node.node_id,
        )

    # Stage 0.

    async def _check_successor(self, successor: Successor) -> None:
        """Whether every stage has room for what it becomes, as far as this one can say: the others' machines are taken to be like this one.

        Raises: RoleRefused when they do not, or the group is not complete; ConfigError.
        """
        if not self.is_grouped:
            raise RoleRefused(f"{self.not_ready()}; wait until it is")
        model = self._config.model
        num_stages = self._config.prefill.num_stages if model.device == "cpu" else 1

        def check() -> None:
            now = footprint_in_role(self._described, "prefill", to_tree(self._config))
            needed = footprint_in_role(self._described, successor.role, successor.settings)
            check_room(needed, now=now, free_bytes=free_bytes(model), num_nodes=num_stages)

        await asyncio.to_thread(check)

    def _companions(self) -> list[str]:
        return self._leader.member_node_ids if self._leader is not None else []

    def _dismiss_others(self) -> None:
        if self._leader is not None:
            self._leader.dismiss()

    async def _lead(self, leader: GroupLeader, coordinator: Coordinator) -> None:
        prefill = self._config.prefill
        assert self._group_metrics is not None
        while True:
            formed = await leader.form()
            uneven = self._note_balance(formed)
            if self._measured_split is not None:
                await self._measured_split.improve(self._split, uneven)
            pipeline = self._new_pipeline(formed.epoch, self._take_local_report)
            session = GroupSession(
                epoch=formed.epoch,
                config=prefill,
                num_pages=formed.num_pages,
                block_tokens=self._layout.block_tokens,
                step_models=formed.step_models,
                send=self._send,
                clock=self._clock,
                metrics=self._group_metrics,
            )
            sender = None
            reason = "stage 0 is closing"
            try:
                sender = await self._open_sender(formed.next_link_address, formed.epoch)
                coordinator.open_session(session)
                await self._set_grouped(True, epoch=formed.epoch)
                reason = await _first_end(leader.wait_lost(), pipeline.run(receiver=None, sender=sender))
            except NodeLost as error:
                reason = str(error)
            finally:
                leader.lose(reason)
                coordinator.close_session(reason)
                if sender is not None:
                    sender.close()
                try:
                    await leader.dissolve()
                finally:
                    await self._end_epoch(pipeline, epoch=formed.epoch, reason=reason)
            await asyncio.sleep(_REJOIN_S)

    def _note_balance(self, formed: FormedGroup) -> UnevenStages | None:
        """Say what makes uneven stages faster, once for each new finding."""
        uneven = uneven_stages(
            self._split,
            formed.step_models,
            layer_group=self._layout.layer_group,
            chunk_tokens=self._config.prefill.chunk_tokens,
        )
        before, self._uneven_stages = self._uneven_stages, str(uneven or "")
        if uneven and self._uneven_stages != before:
            say = log.warning if uneven.better_split else log.info
            say("uneven stages", group=self._config.prefill.group_id, advice=self._uneven_stages)
        return uneven

    def _send(self, entry: stage_pb2.LogEntry) -> None:
        """Give an entry to every stage."""
        assert self._leader is not None
        assert self._pipeline is not None
        self._leader.broadcast(entry)
        try:
            self._pipeline.apply(entry)
        except Exception as error:
            log.exception("log entry not applied", seq=entry.seq)
            self._leader.lose(f"{type(error).__name__}: {error}")

    def _take_local_report(self, report: stage_pb2.StageReport) -> None:
        self._take_report(0, report)

    def _take_report(self, stage_idx: int, report: stage_pb2.StageReport) -> None:
        session = self.coordinator.session if self.coordinator else None
        if session is not None and session.epoch == report.epoch:
            session.on_report(stage_idx, report)

    def _record(self) -> NodeRecord | None:
        coordinator = self.coordinator
        if self.not_ready() is not None or coordinator is None or coordinator.session is None:
            return None
        return NodeRecord(
            node_id=self._config.node.node_id,
            role="prefill",
            address=self.grpc_address,
            http_address=self.http_address,
            boot_id=self._boot_id,
            model_id=self._config.model.name,
            layout_json=self._layout.to_json(),
            host_id=self._config.node.resolve_host_id(),
            pid=os.getpid(),
            load=coordinator.load(coordinator.session),
        )

    # Later stages.

    async def _follow(self, hello: stage_pb2.Hello) -> None:
        prefill = self._config.prefill
        host, port = split_address("prefill.control_address", prefill.control_address)
        last_reason = ""
        while True:
            if self._measured_split is not None:
                await self._measured_split.check(self._split)
            try:
                async with GroupMember.connect(
                    host, port, hello=hello, heartbeat_s=prefill.heartbeat_s, peer_timeout_s=prefill.peer_timeout_s
                ) as member:
                    welcome = await member.welcome()
                    last_reason = ""
                    await self._follow_epoch(member, welcome)
            except NodeLost as error:
                if str(error) != last_reason:
                    log.warning("no group yet", reason=str(error))
                last_reason = str(error)
            await asyncio.sleep(_REJOIN_S)

    async def _follow_epoch(self, member: GroupMember, welcome: stage_pb2.Welcome) -> None:
        assert self._listener is not None
        pipeline = self._new_pipeline(welcome.epoch, member.report)
        receiver: LinkReceiver | None = None
        sender: LinkSender | None = None
        reason = f"stage {self._config.prefill.stage_idx} is closing"
        try:
            sender = await self._open_sender(welcome.next_link_address, welcome.epoch)
            receiver = await self._listener.connection(welcome.epoch, timeout_s=self._config.prefill.peer_timeout_s)
            await self._set_grouped(True, epoch=welcome.epoch)
            reason = await _first_end(
                member.follow(self._applier(pipeline)), pipeline.run(receiver=receiver, sender=sender)
            )
        except NodeLost as error:
            reason = str(error)
        finally:
            _say_why(member, welcome.epoch, self._config.prefill.stage_idx, reason)
            for link in (receiver, sender):
                if link is not None:
                    link.close()
            await self._end_epoch(pipeline, epoch=welcome.epoch, reason=reason)

    def _applier(self, pipeline: StagePipeline) -> Callable[[stage_pb2.LogEntry], None]:
        def apply(entry: stage_pb2.LogEntry) -> None:
            if entry.HasField("leave_group"):
                self.switch.follow("decode")
            else:
                pipeline.apply(entry)

        return apply

    # Both.

    def _new_pipeline(self, epoch: int, report: Report) -> StagePipeline:
        assert self._store is not None
        self._pipeline = StagePipeline(
            epoch=epoch,
            runner=self._runner,
            client=self._client,
            store=self._store,
            threads=self._threads,
            report=report,
            clock=self._clock,
            metrics=self._metrics,
            dtype=self._layout.dtype,
            transfer_timeout_s=self._config.prefill.peer_timeout_s,
            step_model=self._step_model,
            push=self._config.prefill.push,
            max_push_bytes=self._config.prefill.max_push_bytes,
        )
        return self._pipeline

    async def _open_sender(self, address: str, epoch: int) -> LinkSender | None:
        if not address:
            return None
        host, port = split_address("link address of the next stage", address)
        return await LinkSender.connect(
            host,
            port,
            stage_idx=self._config.prefill.stage_idx,
            epoch=epoch,
            timeout_s=self._config.prefill.peer_timeout_s,
        )

    async def _end_epoch(self, pipeline: StagePipeline, *, epoch: int, reason: str) -> None:
        """Nothing of the epoch is left afterwards, and no thread touches the pages. Raises: Internal if a job hangs."""
        try:
            await self._set_grouped(False, epoch=epoch, reason=reason)
        finally:
            await pipeline.close(timeout_s=_DRAIN_TIMEOUT_S)

    async def _set_grouped(self, is_grouped: bool, *, epoch: int, reason: str = "") -> None:
        if is_grouped == self.is_grouped:
            return
        spec = self._runner.spec
        if is_grouped:
            self._ungrouped.clear()
            self._metrics.epochs.inc()
            log.info(
                "group formed",
                group=self._config.prefill.group_id,
                epoch=epoch,
                stage=spec.stage_idx,
                layers=f"[{spec.start_layer},{spec.end_layer})",
            )
        else:
            self._ungrouped.set()
            log.warning("group lost", group=self._config.prefill.group_id, epoch=epoch, reason=reason)
        self._metrics.is_grouped.set(is_grouped)
        await self._publish()

    async def _wait_ungrouped(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._ungrouped.wait()
        except TimeoutError:
            log.warning("leaving a group that works")

    async def _watch(self) -> None:
        """Ask the store how it is, keep the measures current, and find a stage that hangs."""
        grouped_s = self._clock.now()
        while True:
            await asyncio.sleep(self._config.prefill.heartbeat_s)
            if self.is_grouped:
                grouped_s = self._clock.now()
            elif self.switch.is_away and self._clock.now() - grouped_s > _ALONE_S:
                log.warning("no group; the node returns to the role that it was deployed in", waited_s=_ALONE_S)
                self.switch.return_home()
                return
            before = self.not_ready()
            await self._check_store()
            if self.not_ready() != before:
                log.info("readiness changed", reason=self.not_ready() or "ready")
                await self._publish()
            if self._pipeline is not None and self.is_grouped:
                self._pipeline.times.settle()
            if self.coordinator is None or self._leader is None:
                continue
            self.coordinator.update_gauges()
            session = self.coordinator.session
            if session and session.log.has_open_work and self._clock.now() - session.last_report_s > _STUCK_S:
                self._leader.lose(f"no stage has reported progress for {_STUCK_S} s")

    async def _check_store(self) -> None:
        """Takes a heartbeat at most. Raises: AttachmentLost, which ends this process."""
        try:
            self._store_problem = await self._store_call.result(self._config.prefill.heartbeat_s)
        except NoAnswerYet:
            if self._store_call.age_s >= _STORE_ANSWER_S:
                self._store_problem = f"the store has not answered for {_STORE_ANSWER_S:g} s ({self._store_addresses})"

    async def _ask_store(self) -> str | None:
        """Why the store cannot be used. Raises: AttachmentLost."""
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(self._threads.watch, self._transfer.healthy):
            return f"the store does not answer ({self._store_addresses})"
        try:
            # Also tells a store process that was restarted which layout this group uses.
            identity = await self._store_node.register_layout(self._layout)
        except MoontideError as error:
            return str(error)
        if identity != self._store:
            self._store = identity
            if self.coordinator is not None:
                self.coordinator.lose_store()
        return None

    @property
    def _store_addresses(self) -> str:
        return f"master {self._config.store.master_http}, client {self._config.store.client_address}"

    async def _publish(self) -> None:
        """Tell health checks and the registry."""
        if self._server is not None and not self._is_closing:
            await self._server.set_serving(self.not_ready() is None)
        if self._announcer is not None and not self._is_closing:
            await self._announcer.beat_now()


async def _first_end(*works: Coroutine[Any, Any, str | None]) -> str:
    """Run until one of them ends, cancel the others; returns why it ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = next(iter(done))
        error = ended.exception()
        return _reason(error) if error is not None else str(ended.result())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, MoontideError):
        return str(error)
    log.error("stage failed", error=f"{type(error).__name__}: {error}")
    return f"{type(error).__name__}: {error}"


def _say_why(member: GroupMember, epoch: int, stage_idx: int, reason: str) -> None:
    """Best effort: the closed connection says the rest."""
    try:
        member.report(
            stage_pb2.StageReport(epoch=epoch, stage_idx=stage_idx, failed=stage_pb2.StageFailed(message=reason))
        )
    except NodeLost as error:
        log.warning("stage 0 was not told why", reason=str(error))
