from moontide_proto.v1 import common_pb2 as _common_pb2
from moontide_proto.v1 import moontide_pb2 as _moontide_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("token", "num_tokens", "num_chars")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHARS_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    num_tokens: int
    num_chars: int
    def __init__(self, token: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., num_chars: _Optional[int] = ...) -> None: ...

class AnswerDelta(_message.Message):
    __slots__ = ("text", "tokens", "text_offsets", "usage", "finish_reason", "ttft_parts")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TTFT_PARTS_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.Token]
    text_offsets: _containers.RepeatedScalarFieldContainer[int]
    usage: _moontide_pb2.Usage
    finish_reason: str
    ttft_parts: _moontide_pb2.TtftParts
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[_common_pb2.Token, _Mapping]]] = ..., text_offsets: _Optional[_Iterable[int]] = ..., usage: _Optional[_Union[_moontide_pb2.Usage, _Mapping]] = ..., finish_reason: _Optional[str] = ..., ttft_parts: _Optional[_Union[_moontide_pb2.TtftParts, _Mapping]] = ...) -> None: ...
