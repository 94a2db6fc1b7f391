from __future__ import annotations

from typing import Any

import pytest
from crd_schema import convert, document_schema
from jsonschema import Draft202012Validator

CRD: dict[str, Any] = {
    "spec": {
        "group": "example.com",
        "names": {"kind": "Tide"},
        "versions": [
            {"name": "v1beta1", "storage": False},
            {
                "name": "v1",
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "required": ["spec"],
                        "properties": {
                            "status": {"type": "object"},
                            "spec": {
                                "type": "object",
                                "description": "left out",
                                "properties": {
                                    "port": {
                                        "anyOf": [{"type": "integer"}, {"type": "string"}],
                                        "x-kubernetes-int-or-string": True,
                                    },
                                    "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                                    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                                    "template": {
                                        "type": "object",
                                        "properties": {"spec": {"properties": {"containers": {"type": "array"}}}},
                                    },
                                },
                            },
                        },
                    }
                },
            },
        ],
    }
}
HEAD = {"apiVersion": "example.com/v1", "kind": "Tide", "metadata": {"name": "x"}}


def problems(spec: dict[str, Any]) -> list[str]:
    _, schema = document_schema(CRD, "here")
    return [error.message for error in Draft202012Validator(schema).iter_errors(HEAD | {"spec": spec})]


def test_the_file_is_named_after_the_stored_version() -> None:
    name, schema = document_schema(CRD, "here")
    assert (name, schema["$comment"]) == ("example.com_v1_tide.json", "here")


@pytest.mark.parametrize(
    "spec",
    [
        {"port": 1},
        {"port": "http"},
        {"free": {"any": ["thing"]}},
        {"labels": {"a": "b"}},
        {"template": {"spec": {"containers": "checked elsewhere"}}},
    ],
)
def test_what_the_kind_allows_passes(spec: dict[str, Any]) -> None:
    assert problems(spec) == []


@pytest.mark.parametrize("spec", [{"prot": 1}, {"port": 1.5}, {"labels": {"a": 1}}])
def test_what_it_does_not_is_found(spec: dict[str, Any]) -> None:
    assert len(problems(spec)) == 1


def test_pod_templates_are_marked() -> None:
    assert convert({"properties": {"spec": {"properties": {"containers": {}}}}}) == {"x-pod-template": True}
