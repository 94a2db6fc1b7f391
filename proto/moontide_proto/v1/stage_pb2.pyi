from moontide_proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("stage_idx", "num_stages", "boot_id", "link_address", "num_pages", "layout_digest", "hidden_size", "step_model", "layer_split", "store_node_id", "node_id")
    STAGE_IDX_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LINK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEP_MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYER_SPLIT_FIELD_NUMBER: _ClassVar[int]
    STORE_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    stage_idx: int
    num_stages: int
    boot_id: str
    link_address: str
    num_pages: int
    layout_digest: bytes
    hidden_size: int
    step_model: StepModel
    layer_split: _containers.RepeatedScalarFieldContainer[int]
    store_node_id: str
    node_id: str
    def __init__(self, stage_idx: _Optional[int] = ..., num_stages: _Optional[int] = ..., boot_id: _Optional[str] = ..., link_address: _Optional[str] = ..., num_pages: _Optional[int] = ..., layout_digest: _Optional[bytes] = ..., hidden_size: _Optional[int] = ..., step_model: _Optional[_Union[StepModel, _Mapping]] = ..., layer_split: _Optional[_Iterable[int]] = ..., store_node_id: _Optional[str] = ..., node_id: _Optional[str] = ...) -> None: ...

class StepModel(_message.Message):
    __slots__ = ("overhead_s", "token_s", "pair_s", "knee_tokens")
    OVERHEAD_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PAIR_S_FIELD_NUMBER: _ClassVar[int]
    KNEE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    overhead_s: float
    token_s: float
    pair_s: float
    knee_tokens: int
    def __init__(self, overhead_s: _Optional[float] = ..., token_s: _Optional[float] = ..., pair_s: _Optional[float] = ..., knee_tokens: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch", "next_link_address", "num_pages")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_LINK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    next_link_address: str
    num_pages: int
    def __init__(self, epoch: _Optional[int] = ..., next_link_address: _Optional[str] = ..., num_pages: _Optional[int] = ...) -> None: ...

class LogEntry(_message.Message):
    __slots__ = ("epoch", "seq", "compute", "fetch", "end", "heartbeat", "leave_group")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_GROUP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    compute: ComputeStep
    fetch: FetchPrefix
    end: EndRequest
    heartbeat: Heartbeat
    leave_group: LeaveGroup
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., compute: _Optional[_Union[ComputeStep, _Mapping]] = ..., fetch: _Optional[_Union[FetchPrefix, _Mapping]] = ..., end: _Optional[_Union[EndRequest, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., leave_group: _Optional[_Union[LeaveGroup, _Mapping]] = ...) -> None: ...

class ComputeStep(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    def __init__(self, chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("request_id", "request_epoch", "first_token", "num_tokens", "new_pages", "token_ids", "block_hashes", "is_last", "sampling", "output_idx")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    request_epoch: int
    first_token: int
    num_tokens: int
    new_pages: _containers.RepeatedScalarFieldContainer[int]
    token_ids: bytes
    block_hashes: bytes
    is_last: bool
    sampling: _common_pb2.SamplingParams
    output_idx: int
    def __init__(self, request_id: _Optional[str] = ..., request_epoch: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., new_pages: _Optional[_Iterable[int]] = ..., token_ids: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., is_last: _Optional[bool] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., output_idx: _Optional[int] = ...) -> None: ...

class FetchPrefix(_message.Message):
    __slots__ = ("request_id", "request_epoch", "block_hashes", "pages", "first_block")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    request_epoch: int
    block_hashes: bytes
    pages: _containers.RepeatedScalarFieldContainer[int]
    first_block: int
    def __init__(self, request_id: _Optional[str] = ..., request_epoch: _Optional[int] = ..., block_hashes: _Optional[bytes] = ..., pages: _Optional[_Iterable[int]] = ..., first_block: _Optional[int] = ...) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ("request_id", "request_epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    request_epoch: int
    def __init__(self, request_id: _Optional[str] = ..., request_epoch: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveGroup(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageReport(_message.Message):
    __slots__ = ("epoch", "stage_idx", "step_done", "puts_done", "fetch_done", "end_done", "failed", "heartbeat")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_IDX_FIELD_NUMBER: _ClassVar[int]
    STEP_DONE_FIELD_NUMBER: _ClassVar[int]
    PUTS_DONE_FIELD_NUMBER: _ClassVar[int]
    FETCH_DONE_FIELD_NUMBER: _ClassVar[int]
    END_DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    stage_idx: int
    step_done: StepDone
    puts_done: PutsDone
    fetch_done: FetchDone
    end_done: EndDone
    failed: StageFailed
    heartbeat: Heartbeat
    def __init__(self, epoch: _Optional[int] = ..., stage_idx: _Optional[int] = ..., step_done: _Optional[_Union[StepDone, _Mapping]] = ..., puts_done: _Optional[_Union[PutsDone, _Mapping]] = ..., fetch_done: _Optional[_Union[FetchDone, _Mapping]] = ..., end_done: _Optional[_Union[EndDone, _Mapping]] = ..., failed: _Optional[_Union[StageFailed, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class StepDone(_message.Message):
    __slots__ = ("seq", "wait_recv_s", "compute_s", "age_s", "tokens", "wait_send_s")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    WAIT_RECV_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SEND_S_FIELD_NUMBER: _ClassVar[int]
    seq: int
    wait_recv_s: float
    compute_s: float
    age_s: float
    tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.Token]
    wait_send_s: float
    def __init__(self, seq: _Optional[int] = ..., wait_recv_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., age_s: _Optional[float] = ..., tokens: _Optional[_Iterable[_Union[_common_pb2.Token, _Mapping]]] = ..., wait_send_s: _Optional[float] = ...) -> None: ...

class PutsDone(_message.Message):
    __slots__ = ("seq", "put_s", "age_s", "failed")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PUT_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    put_s: float
    age_s: float
    failed: int
    def __init__(self, seq: _Optional[int] = ..., put_s: _Optional[float] = ..., age_s: _Optional[float] = ..., failed: _Optional[int] = ...) -> None: ...

class FetchDone(_message.Message):
    __slots__ = ("request_id", "request_epoch", "num_blocks", "fetch_s", "age_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    request_epoch: int
    num_blocks: int
    fetch_s: float
    age_s: float
    def __init__(self, request_id: _Optional[str] = ..., request_epoch: _Optional[int] = ..., num_blocks: _Optional[int] = ..., fetch_s: _Optional[float] = ..., age_s: _Optional[float] = ...) -> None: ...

class EndDone(_message.Message):
    __slots__ = ("request_id", "request_epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    request_epoch: int
    def __init__(self, request_id: _Optional[str] = ..., request_epoch: _Optional[int] = ...) -> None: ...

class StageFailed(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class TensorHeader(_message.Message):
    __slots__ = ("epoch", "seq", "request_ids", "first_tokens", "num_tokens", "hidden_size", "dtype")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    first_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    hidden_size: int
    dtype: str
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., request_ids: _Optional[_Iterable[str]] = ..., first_tokens: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., hidden_size: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...
