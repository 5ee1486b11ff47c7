"""The findings of `anyrank.check`, as data and as text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from anyrank.wording import count

INDENT = " " * 12  # rules have at most eleven letters


@dataclass(frozen=True)
class Finding:
    """One problem that `check` found in the setup of a training.

    Attributes:
        rule: the rule that found it; see `check`.
        what: the problem, in a sentence.
        where: the parameter, module or sampler, and the ranks.
        why: the consequence.
        fix: code, or an action.
    """

    rule: str
    what: str
    where: str
    why: str
    fix: str

    def __str__(self) -> str:
        head = f"  {self.rule:<10}{self.what}"
        return "\n".join([head, *(f"{INDENT}{text}" for text in (self.where, self.why, self.fix))])


class Findings(list[Finding]):
    """The findings of a check, the same on every rank: a list with a text for a person as `str`.

    Attributes:
        num_ranks: number of ranks that were checked together.
    """

    def __init__(self, findings: list[Finding], num_ranks: int) -> None:
        super().__init__(findings)
        self.num_ranks = num_ranks

    def __str__(self) -> str:
        head = f"check: {count(len(self), 'finding')} on {count(self.num_ranks, 'rank')}"
        return "\n".join([head, *map(str, self)])

    def to_json(self) -> str:
        """Return the findings as a JSON object."""
        plain = {"ranks": self.num_ranks, "findings": [asdict(finding) for finding in self]}
        return json.dumps(plain, indent=2)
