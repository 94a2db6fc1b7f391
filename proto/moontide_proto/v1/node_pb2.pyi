from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SwitchRoleRequest(_message.Message):
    __slots__ = ("role", "place")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    role: str
    place: PlaceInGroup
    def __init__(self, role: _Optional[str] = ..., place: _Optional[_Union[PlaceInGroup, _Mapping]] = ...) -> None: ...

class PlaceInGroup(_message.Message):
    __slots__ = ("group_id", "stage_idx", "num_stages", "control_address")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_IDX_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    stage_idx: int
    num_stages: int
    control_address: str
    def __init__(self, group_id: _Optional[str] = ..., stage_idx: _Optional[int] = ..., num_stages: _Optional[int] = ..., control_address: _Optional[str] = ...) -> None: ...

class SwitchRoleReply(_message.Message):
    __slots__ = ("node_ids",)
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_ids: _Optional[_Iterable[str]] = ...) -> None: ...
