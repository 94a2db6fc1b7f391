"""`python tests/deploy/chart/crd_schema.py CRD.yaml SOURCE`: writes crds/GROUP_VERSION_KIND.json for the stored version of a custom kind.

SOURCE is text for `$comment`: repository, commit, file, licence. What is left out and what is made stricter says README.md beside this.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

DIRECTORY = Path(__file__).parent / "crds"
KEPT = frozenset(
    [
        "type",
        "properties",
        "items",
        "required",
        "enum",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "uniqueItems",
        "minProperties",
        "maxProperties",
        "additionalProperties",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
    ]
)
Schema = dict[str, Any]


def convert(schema: Schema | bool) -> Schema | bool:
    """OpenAPI v3 of a CustomResourceDefinition -> JSON Schema that refuses fields it does not list."""
    if isinstance(schema, bool):
        return schema
    if _is_pod_template(schema):
        return {"x-pod-template": True}
    converted = {key: _convert_value(key, value) for key, value in schema.items() if key in KEPT}
    if schema.get("x-kubernetes-int-or-string"):
        converted.pop("anyOf", None)
        converted["type"] = ["integer", "string"]
    if schema.get("nullable") and isinstance(converted.get("type"), str):
        converted["type"] = [converted["type"], "null"]
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in converted
    if converted.get("type") == "object" and "properties" in converted and not is_open:
        converted["additionalProperties"] = False
    return converted


def document_schema(crd: Schema, source: str) -> tuple[str, Schema]:
    """(file name, schema of a whole document) for the version that is stored."""
    group, kind = crd["spec"]["group"], crd["spec"]["names"]["kind"]
    version = next(version for version in crd["spec"]["versions"] if version["storage"])
    schema = convert(version["schema"]["openAPIV3Schema"])
    assert isinstance(schema, dict)
    schema["properties"].pop("status", None)
    schema["properties"] |= {
        "metadata": {"type": "object"},
        "apiVersion": {"const": f"{group}/{version['name']}"},
        "kind": {"const": kind},
    }
    required = {"apiVersion", "kind", "metadata", "spec", *schema.get("required", [])} - {"status"}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": source}
    return f"{group}_{version['name']}_{kind.lower()}.json", head | schema | {"required": sorted(required)}


def _is_pod_template(schema: Schema) -> bool:
    spec = schema.get("properties", {}).get("spec", {})
    return "containers" in spec.get("properties", {})


def _convert_value(key: str, value: Any) -> Any:
    if key == "properties":
        return {name: convert(part) for name, part in sorted(value.items())}
    if key in ("anyOf", "oneOf", "allOf"):
        return [convert(part) for part in value]
    if key in ("items", "additionalProperties", "not"):
        return convert(value)
    return value


def main(crd_path: Path, source: str) -> None:
    name, schema = document_schema(yaml.load(crd_path.read_text(), yaml.CSafeLoader), source)
    (DIRECTORY / name).write_text(json.dumps(schema, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
