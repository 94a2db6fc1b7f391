"""The gRPC service of a prefill group: a thin shell around the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc.aio

from moontide.rpc import grpc_errors
from moontide_proto.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_node.coordinator import Coordinator

SERVICE_NAME = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Served by stage 0."""

    def __init__(
        self, coordinator: Coordinator, *, node_id: str, num_stages: int, uneven_stages: Callable[[], str]
    ) -> None:
        self._coordinator = coordinator
        self._node_id = node_id
        self._num_stages = num_stages
        self._uneven_stages = uneven_stages

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:
        async with grpc_errors(context, request.request_id):
            await self._coordinator.run(request, context.write)

    async def GetStatus(
        self, _request: prefill_pb2.PrefillStatusRequest, _context: Context
    ) -> prefill_pb2.PrefillStatus:
        session = self._coordinator.session
        status = prefill_pb2.PrefillStatus(
            node_id=self._node_id,
            num_stages=self._num_stages,
            waiting=self._coordinator.num_waiting,
            running=self._coordinator.num_running,
            queued_tokens=self._coordinator.queued_tokens,
            reservations=self._coordinator.num_reservations,
            uneven_stages=self._uneven_stages(),
        )
        if session is not None:
            status.epoch = session.epoch
            status.num_pages = session.pages.num_pages
            status.free_pages = session.pages.num_free
            status.open_puts = session.log.open_puts
            status.in_flight_steps = session.log.in_flight_steps
        return status
