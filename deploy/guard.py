"""A small process that outlives `moontide up` for a moment, so that nothing else does.

It reads lines `+SID` and `-SID` (sessions that began and ended) from its standard input. When the other end closes, for whatever reason,
kill -9 included, it kills all members of the sessions that are left.
Run as a script with `python -I -S`, hence only the standard library and its sibling file.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deploy.sessions import kill_sessions


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        (sessions.add if line[0] == "+" else sessions.discard)(int(line[1:]))
    return 1 if kill_sessions(sessions) else 0


if __name__ == "__main__":
    sys.exit(main())
