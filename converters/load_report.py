"""What does not fit between a checkpoint and a model, all of it in one message."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

_NUMBER = re.compile(r"(?<=\.)(?:\d+|\{[^}]*\})(?=\.)")


@dataclass
class LoadReport:
    """Pairs of a name and a detail, collected before anything is read.

    Attributes:
        missing: tensors that the model needs and the checkpoint lacks.
        unexpected: tensors that no parameter takes.
        mismatched: tensors whose shape or dtype the parameter cannot take.
        duplicated: parameters filled by several rules, or tensors taken by several parameters.
        unmapped: parameters without a rule.
        indivisible: parameters that the mesh cannot split evenly.
        hints: sentences that follow the lists.
    """

    missing: list[tuple[str, str]] = field(default_factory=list)
    unexpected: list[tuple[str, str]] = field(default_factory=list)
    mismatched: list[tuple[str, str]] = field(default_factory=list)
    duplicated: list[tuple[str, str]] = field(default_factory=list)
    unmapped: list[tuple[str, str]] = field(default_factory=list)
    indivisible: list[tuple[str, str]] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(entries for _, entries in self._sections())

    def text(self, path: object) -> str:
        """The message: a section a kind, equal entries of several layers in one line."""
        lines = [f"the weights in {path} do not fit the model:"]
        for title, entries in self._sections():
            if not entries:
                continue
            lines.append(f"  {title} ({len(entries)}):")
            lines += [f"    {name}  {detail}" for name, detail in merge_numbers(entries)]
        return "\n".join(lines + self.hints)

    def _sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        return [
            ("missing in the checkpoint", self.missing),
            ("unexpected in the checkpoint", self.unexpected),
            ("mismatched", self.mismatched),
            ("duplicated", self.duplicated),
            ("parameters that the name map does not know", self.unmapped),
            ("parameters that do not divide over the mesh", self.indivisible),
        ]


def merge_numbers(entries: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merges entries that differ in one number of the name: "layers.{0..3,7}.mlp.weight"."""
    merged = list(entries)
    most = max((len(_NUMBER.findall(name)) for name, _ in merged), default=0)
    for position in range(most):
        groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for name, detail in merged:
            numbers = list(_NUMBER.finditer(name))
            if position < len(numbers):
                start, end = numbers[position].span()
                groups[name[:start], name[end:], detail].append(name[start:end])
            else:
                groups[name, "", detail].append("")
        merged = [
            (before + _ranges(numbers) + after, detail)
            for (before, after, detail), numbers in groups.items()
        ]
    return merged


def _ranges(texts: list[str]) -> str:
    """["0", "1", "2", "7"] -> "{0..2,7}"; a single one stays as it is."""
    if len(texts) == 1:
        return texts[0]
    runs: list[list[int]] = []
    for number in sorted(map(int, texts)):
        if runs and number <= runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(f"{first}..{last}" if last > first else f"{first}" for first, last in runs)
    return "{" + text + "}"
