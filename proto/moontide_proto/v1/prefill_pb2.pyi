from moontide_proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "token_ids", "sampling", "output_idx", "cache_salt", "timeout_s", "ttft_slo_s", "tenant", "tenant_weight", "priority", "copy_blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDX_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    COPY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    token_ids: bytes
    sampling: _common_pb2.SamplingParams
    output_idx: int
    cache_salt: str
    timeout_s: float
    ttft_slo_s: float
    tenant: str
    tenant_weight: float
    priority: int
    copy_blocks: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., output_idx: _Optional[int] = ..., cache_salt: _Optional[str] = ..., timeout_s: _Optional[float] = ..., ttft_slo_s: _Optional[float] = ..., tenant: _Optional[str] = ..., tenant_weight: _Optional[float] = ..., priority: _Optional[int] = ..., copy_blocks: _Optional[int] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("accepted", "sealed", "first_token", "completed")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    accepted: PrefillAccepted
    sealed: BlocksSealed
    first_token: FirstToken
    completed: PrefillCompleted
    def __init__(self, accepted: _Optional[_Union[PrefillAccepted, _Mapping]] = ..., sealed: _Optional[_Union[BlocksSealed, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., completed: _Optional[_Union[PrefillCompleted, _Mapping]] = ...) -> None: ...

class PrefillAccepted(_message.Message):
    __slots__ = ("store_node_id", "store_address", "hit_tokens")
    STORE_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    store_node_id: str
    store_address: str
    hit_tokens: int
    def __init__(self, store_node_id: _Optional[str] = ..., store_address: _Optional[str] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class BlocksSealed(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token", "timings")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    token: _common_pb2.Token
    timings: PrefillTimings
    def __init__(self, token: _Optional[_Union[_common_pb2.Token, _Mapping]] = ..., timings: _Optional[_Union[PrefillTimings, _Mapping]] = ...) -> None: ...

class PrefillTimings(_message.Message):
    __slots__ = ("queue_s", "fetch_s", "compute_s", "total_s", "predicted_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    fetch_s: float
    compute_s: float
    total_s: float
    predicted_s: float
    def __init__(self, queue_s: _Optional[float] = ..., fetch_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., total_s: _Optional[float] = ..., predicted_s: _Optional[float] = ...) -> None: ...

class PrefillCompleted(_message.Message):
    __slots__ = ("num_blocks", "has_partial", "spans", "age_s", "plan")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HAS_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    has_partial: bool
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.Span]
    age_s: float
    plan: str
    def __init__(self, num_blocks: _Optional[int] = ..., has_partial: _Optional[bool] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.Span, _Mapping]]] = ..., age_s: _Optional[float] = ..., plan: _Optional[str] = ...) -> None: ...

class PrefillStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillStatus(_message.Message):
    __slots__ = ("node_id", "num_stages", "epoch", "waiting", "running", "queued_tokens", "num_pages", "free_pages", "open_puts", "in_flight_steps", "reservations", "uneven_stages")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    OPEN_PUTS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_STEPS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    UNEVEN_STAGES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    num_stages: int
    epoch: int
    waiting: int
    running: int
    queued_tokens: int
    num_pages: int
    free_pages: int
    open_puts: int
    in_flight_steps: int
    reservations: int
    uneven_stages: str
    def __init__(self, node_id: _Optional[str] = ..., num_stages: _Optional[int] = ..., epoch: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., num_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., open_puts: _Optional[int] = ..., in_flight_steps: _Optional[int] = ..., reservations: _Optional[int] = ..., uneven_stages: _Optional[str] = ...) -> None: ...
