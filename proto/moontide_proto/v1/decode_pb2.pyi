from moontide_proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeCommand(_message.Message):
    __slots__ = ("request_id", "epoch", "open", "sealed", "start", "cancel")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    open: DecodeOpen
    sealed: DecodeSealed
    start: DecodeStart
    cancel: DecodeCancel
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., open: _Optional[_Union[DecodeOpen, _Mapping]] = ..., sealed: _Optional[_Union[DecodeSealed, _Mapping]] = ..., start: _Optional[_Union[DecodeStart, _Mapping]] = ..., cancel: _Optional[_Union[DecodeCancel, _Mapping]] = ...) -> None: ...

class DecodeOpen(_message.Message):
    __slots__ = ("token_ids", "sampling", "cache_salt", "timeout_s", "output_idx", "tbt_slo_s", "local_prefill")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDX_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    sampling: _common_pb2.SamplingParams
    cache_salt: str
    timeout_s: float
    output_idx: int
    tbt_slo_s: float
    local_prefill: LocalPrefill
    def __init__(self, token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., timeout_s: _Optional[float] = ..., output_idx: _Optional[int] = ..., tbt_slo_s: _Optional[float] = ..., local_prefill: _Optional[_Union[LocalPrefill, _Mapping]] = ...) -> None: ...

class LocalPrefill(_message.Message):
    __slots__ = ("store_node_id", "store_address")
    STORE_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    store_node_id: str
    store_address: str
    def __init__(self, store_node_id: _Optional[str] = ..., store_address: _Optional[str] = ...) -> None: ...

class DecodeSealed(_message.Message):
    __slots__ = ("num_blocks", "store_node_id")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORE_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    store_node_id: str
    def __init__(self, num_blocks: _Optional[int] = ..., store_node_id: _Optional[str] = ...) -> None: ...

class DecodeStart(_message.Message):
    __slots__ = ("first_token", "store_address")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    first_token: _common_pb2.Token
    store_address: str
    def __init__(self, first_token: _Optional[_Union[_common_pb2.Token, _Mapping]] = ..., store_address: _Optional[str] = ...) -> None: ...

class DecodeCancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DecodeEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[DecodeEvent, _Mapping]]] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("request_id", "epoch", "pulled", "tokens", "finished", "failed", "local_prefill_done")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_DONE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    pulled: DecodePulled
    tokens: DecodeTokens
    finished: DecodeFinished
    failed: DecodeFailed
    local_prefill_done: LocalPrefillDone
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., pulled: _Optional[_Union[DecodePulled, _Mapping]] = ..., tokens: _Optional[_Union[DecodeTokens, _Mapping]] = ..., finished: _Optional[_Union[DecodeFinished, _Mapping]] = ..., failed: _Optional[_Union[DecodeFailed, _Mapping]] = ..., local_prefill_done: _Optional[_Union[LocalPrefillDone, _Mapping]] = ...) -> None: ...

class DecodePulled(_message.Message):
    __slots__ = ("wait_pages_s", "handoff_s", "spans", "age_s")
    WAIT_PAGES_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_S_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    wait_pages_s: float
    handoff_s: float
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.Span]
    age_s: float
    def __init__(self, wait_pages_s: _Optional[float] = ..., handoff_s: _Optional[float] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.Span, _Mapping]]] = ..., age_s: _Optional[float] = ...) -> None: ...

class LocalPrefillDone(_message.Message):
    __slots__ = ("hit_tokens", "queue_s", "fetch_s", "compute_s", "predicted_s")
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    hit_tokens: int
    queue_s: float
    fetch_s: float
    compute_s: float
    predicted_s: float
    def __init__(self, hit_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., fetch_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., predicted_s: _Optional[float] = ...) -> None: ...

class DecodeTokens(_message.Message):
    __slots__ = ("tokens", "spans", "age_s")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.Token]
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.Span]
    age_s: float
    def __init__(self, tokens: _Optional[_Iterable[_Union[_common_pb2.Token, _Mapping]]] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.Span, _Mapping]]] = ..., age_s: _Optional[float] = ...) -> None: ...

class DecodeFinished(_message.Message):
    __slots__ = ("reason", "stop_token_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    stop_token_id: int
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class DecodeFailed(_message.Message):
    __slots__ = ("code", "message", "retriable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRIABLE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retriable: bool
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retriable: _Optional[bool] = ...) -> None: ...

class DecodeStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeStatus(_message.Message):
    __slots__ = ("node_id", "waiting", "pulling", "running", "num_pages", "free_pages", "max_batch")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PULLING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    waiting: int
    pulling: int
    running: int
    num_pages: int
    free_pages: int
    max_batch: int
    def __init__(self, node_id: _Optional[str] = ..., waiting: _Optional[int] = ..., pulling: _Optional[int] = ..., running: _Optional[int] = ..., num_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., max_batch: _Optional[int] = ...) -> None: ...
