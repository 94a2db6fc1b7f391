"""A process that keeps its freed memory touches no new page for what it frees and takes again."""

import subprocess
import sys

_PROGRAM = """
import resource, sys
from model_runner.native.memory import keep_freed_memory

def faults_of_a_step() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults_of_a_step()
mapped = faults_of_a_step()
keep_freed_memory()
faults_of_a_step()
print(mapped, faults_of_a_step())
"""


def test_freed_memory_is_taken_again_without_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    mapped, kept = map(int, done.stdout.split())
    assert kept < mapped / 10
