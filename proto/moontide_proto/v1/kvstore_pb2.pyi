from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterLayoutRequest(_message.Message):
    __slots__ = ("layout_json",)
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    layout_json: str
    def __init__(self, layout_json: _Optional[str] = ...) -> None: ...

class RegisterLayoutReply(_message.Message):
    __slots__ = ("node_id", "boot_id", "segment")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    boot_id: str
    segment: str
    def __init__(self, node_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., segment: _Optional[str] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "layout_digest", "parent_hash", "block_hashes", "has_partial", "lease_s", "is_write_back")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    HAS_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    IS_WRITE_BACK_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    layout_digest: bytes
    parent_hash: bytes
    block_hashes: bytes
    has_partial: bool
    lease_s: float
    is_write_back: bool
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., layout_digest: _Optional[bytes] = ..., parent_hash: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., has_partial: _Optional[bool] = ..., lease_s: _Optional[float] = ..., is_write_back: _Optional[bool] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("result", "hit_blocks", "needed_bytes", "capacity_bytes", "segment", "promoted_blocks")
    class Result(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RESULT_UNSPECIFIED: _ClassVar[ReserveReply.Result]
        RESERVED: _ClassVar[ReserveReply.Result]
        WAIT: _ClassVar[ReserveReply.Result]
        TOO_LARGE: _ClassVar[ReserveReply.Result]
    RESULT_UNSPECIFIED: ReserveReply.Result
    RESERVED: ReserveReply.Result
    WAIT: ReserveReply.Result
    TOO_LARGE: ReserveReply.Result
    RESULT_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEEDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    result: ReserveReply.Result
    hit_blocks: int
    needed_bytes: int
    capacity_bytes: int
    segment: str
    promoted_blocks: int
    def __init__(self, result: _Optional[_Union[ReserveReply.Result, str]] = ..., hit_blocks: _Optional[int] = ..., needed_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., segment: _Optional[str] = ..., promoted_blocks: _Optional[int] = ...) -> None: ...

class SealRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "first_block", "num_blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    first_block: int
    num_blocks: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class SealReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("request_ids", "lease_s")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    lease_s: float
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("unknown_request_ids",)
    UNKNOWN_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    unknown_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unknown_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvStoreStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvStoreStats(_message.Message):
    __slots__ = ("node_id", "boot_id", "capacity_bytes", "used_bytes", "sealed_blocks", "reservations", "pinned_blocks", "objects_to_remove", "ssd_capacity_bytes", "ssd_used_bytes", "ssd_blocks", "replica_blocks")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEALED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_TO_REMOVE_FIELD_NUMBER: _ClassVar[int]
    SSD_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    boot_id: str
    capacity_bytes: int
    used_bytes: int
    sealed_blocks: int
    reservations: int
    pinned_blocks: int
    objects_to_remove: int
    ssd_capacity_bytes: int
    ssd_used_bytes: int
    ssd_blocks: int
    replica_blocks: int
    def __init__(self, node_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., sealed_blocks: _Optional[int] = ..., reservations: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., objects_to_remove: _Optional[int] = ..., ssd_capacity_bytes: _Optional[int] = ..., ssd_used_bytes: _Optional[int] = ..., ssd_blocks: _Optional[int] = ..., replica_blocks: _Optional[int] = ...) -> None: ...

class ReplicateRequest(_message.Message):
    __slots__ = ("layout_digest", "parent_hash", "block_hashes", "timeout_s")
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    layout_digest: bytes
    parent_hash: bytes
    block_hashes: bytes
    timeout_s: float
    def __init__(self, layout_digest: _Optional[bytes] = ..., parent_hash: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class ReplicateReply(_message.Message):
    __slots__ = ("num_blocks", "copied_blocks", "copy_s")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPY_S_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    copied_blocks: int
    copy_s: float
    def __init__(self, num_blocks: _Optional[int] = ..., copied_blocks: _Optional[int] = ..., copy_s: _Optional[float] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotRuns(_message.Message):
    __slots__ = ("boot_id", "event_number", "runs")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    event_number: int
    runs: _containers.RepeatedCompositeFieldContainer[SnapshotRun]
    def __init__(self, boot_id: _Optional[str] = ..., event_number: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[SnapshotRun, _Mapping]]] = ...) -> None: ...

class SnapshotRun(_message.Message):
    __slots__ = ("parent_hash", "block_hashes")
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    parent_hash: bytes
    block_hashes: bytes
    def __init__(self, parent_hash: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("max_blocks",)
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    max_blocks: int
    def __init__(self, max_blocks: _Optional[int] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("hash", "parent_hash", "num_bytes", "tier", "is_sealed", "references", "uses", "idle_s")
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    IS_SEALED_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    parent_hash: bytes
    num_bytes: int
    tier: str
    is_sealed: bool
    references: int
    uses: int
    idle_s: float
    def __init__(self, hash: _Optional[bytes] = ..., parent_hash: _Optional[bytes] = ..., num_bytes: _Optional[int] = ..., tier: _Optional[str] = ..., is_sealed: _Optional[bool] = ..., references: _Optional[int] = ..., uses: _Optional[int] = ..., idle_s: _Optional[float] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("block_hashes", "num_bytes")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    num_bytes: int
    def __init__(self, block_hashes: _Optional[bytes] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("num_blocks", "num_bytes", "num_pinned")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_bytes: int
    num_pinned: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_pinned: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("max_blocks", "drop_damaged")
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROP_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    max_blocks: int
    drop_damaged: bool
    def __init__(self, max_blocks: _Optional[int] = ..., drop_damaged: _Optional[bool] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("num_blocks", "num_missing", "num_damaged", "bad_hashes", "num_unread")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_MISSING_FIELD_NUMBER: _ClassVar[int]
    NUM_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    BAD_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_UNREAD_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_missing: int
    num_damaged: int
    bad_hashes: bytes
    num_unread: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_missing: _Optional[int] = ..., num_damaged: _Optional[int] = ..., bad_hashes: _Optional[bytes] = ..., num_unread: _Optional[int] = ...) -> None: ...
