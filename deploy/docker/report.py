"""What is printed: a line for each check, and what was not exercised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from deploy.docker.dockerfile import Instruction, Stage


class Report:
    """One line per check."""

    def __init__(self) -> None:
        self.failed = 0
        self.passed = 0

    def check(self, name: str, problem: str = "") -> bool:
        """`problem`: empty when all is well."""
        print(f"{'FAIL' if problem else 'ok  '} {name}{': ' if problem else ''}{problem}", flush=True)
        self.failed += bool(problem)
        self.passed += not problem
        return not problem

    def note(self, kind: str, text: str) -> None:
        print(f"{kind:<4} {text}", flush=True)


class Coverage:
    """Which instructions of the Dockerfile were exercised."""

    def __init__(self, stages: Mapping[str, Stage]) -> None:
        self._left = {
            (stage.name, position): instruction
            for stage in stages.values()
            for position, instruction in enumerate(stage.instructions)
        }

    def exercised(self, stage: Stage, position: int) -> None:
        self._left.pop((stage.name, position), None)

    def exercised_words(self, chain: Sequence[Stage], words: Sequence[str]) -> None:
        for stage in chain:
            for position, instruction in enumerate(stage.instructions):
                if instruction.word in words:
                    self.exercised(stage, position)

    def left(self) -> Iterator[tuple[str, Instruction]]:
        """(stage, instruction)."""
        return ((name, instruction) for (name, _position), instruction in self._left.items())
