"""The generated code that is checked in is what `make proto` makes of the schemas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = Path("moontide_proto") / "v1"


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    schemas = sorted((ROOT / "proto" / SCHEMAS).glob("*.proto"))
    subprocess.run(
        [
            sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}",
            f"--grpc_python_out={tmp_path}", *(str(path.relative_to(ROOT)) for path in schemas),
        ],
        cwd=ROOT, check=True,
    )  # fmt: skip
    made = {path.name: path.read_text() for path in (tmp_path / SCHEMAS).iterdir()}
    assert len(made) == 3 * len(schemas)
    stale = [name for name, text in made.items() if (ROOT / "proto" / SCHEMAS / name).read_text() != text]
    assert stale == [], "run `make proto`"
