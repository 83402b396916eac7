"""A knowledge graph as (subject, relation, object) facts, and walks through it.

A walk takes only steps that have one answer: a (subject, relation) with two objects makes no checkable question. It
visits nothing twice, so that no hop can be left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from megatron_mopd.errors import UserError

MAX_ATTEMPTS = 1000


class Fact(NamedTuple):
    subject: str
    relation: str
    object: str


@dataclass(frozen=True)
class Walk:
    """Facts of which each begins where the one before it ended."""

    facts: tuple[Fact, ...]

    @property
    def start(self) -> str:
        return self.facts[0].subject

    @property
    def end(self) -> str:
        return self.facts[-1].object

    @property
    def relations(self) -> tuple[str, ...]:
        return tuple(fact.relation for fact in self.facts)


class KnowledgeGraph:
    def __init__(self, facts: Iterable[Fact]) -> None:
        self.facts = tuple(dict.fromkeys(facts))
        objects: dict[tuple[str, str], list[Fact]] = {}
        for fact in self.facts:
            objects.setdefault((fact.subject, fact.relation), []).append(fact)
        self._steps: dict[str, list[Fact]] = {}
        for (subject, _), found in objects.items():
            if len(found) == 1:
                self._steps.setdefault(subject, []).append(found[0])

    def follow(self, start: str, relations: Sequence[str]) -> str | None:
        """Where the relations lead from `start`; None where a step has no answer, or more than one."""
        entity = start
        for relation in relations:
            step = [fact for fact in self._steps.get(entity, ()) if fact.relation == relation]
            if not step:
                return None
            entity = step[0].object
        return entity

    def walk(self, num_hops: int, rng: Random) -> Walk:
        """A random walk. Raises UserError where the graph has none of this length within reach."""
        starts = list(self._steps)
        for _ in range(MAX_ATTEMPTS if starts else 0):
            facts: list[Fact] = []
            visited = {entity := rng.choice(starts)}
            while len(facts) < num_hops:
                steps = [fact for fact in self._steps.get(entity, ()) if fact.object not in visited]
                if not steps:
                    break
                facts.append(fact := rng.choice(steps))
                visited.add(entity := fact.object)
            if len(facts) == num_hops:
                return Walk(tuple(facts))
        raise UserError(
            f"the graph of {len(self.facts)} facts has no walk of {num_hops} unambiguous hops, or hardly any; add "
            "facts or ask for fewer hops"
        )


def random_graph(rng: Random, num_entities: int, relations: Sequence[str]) -> KnowledgeGraph:
    """A graph over invented names, in which every entity has one object for each relation: nothing to be known by
    heart."""
    names = _names(rng, num_entities)
    facts = [
        Fact(subject, relation, rng.choice([name for name in names if name != subject]))
        for subject in names
        for relation in relations
    ]
    return KnowledgeGraph(facts)


def _names(rng: Random, num: int) -> list[str]:
    onsets, vowels = (
        ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "dr", "kl", "st", "tr"),
        "aeiou",
    )
    names: dict[str, None] = {}
    while len(names) < num:
        syllables = [rng.choice(onsets) + rng.choice(vowels) for _ in range(rng.choice((2, 3)))]
        names["".join(syllables).capitalize()] = None
    return list(names)
