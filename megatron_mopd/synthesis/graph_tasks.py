"""Multi-hop questions over a knowledge graph: a walk is drawn, its facts are shown among others in random order, and
the question is where the walk ends.

    Facts: the mentor of Dabo is Kelu. the rival of Kelu is Strima. the mentor of Strima is Dabo. ...
    Question: who is the rival of the mentor of Dabo?                                            label: Strima

Difficulty is the number of hops. A question is the same whatever facts stand round it: asked in one split, it is asked
in no other. A task's answer follows from the facts that it shows: `KnowledgeGraph.follow` on them
alone gives the label (tests/unit/test_synthesis.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from megatron_mopd.synthesis.graph import Fact, KnowledgeGraph, Walk
from megatron_mopd.synthesis.task import Task


class GraphQuestions:
    """A Generator (task.py); judged by the verifier answer_match."""

    def __init__(
        self,
        graph: KnowledgeGraph,
        *,
        domain: str,
        environment: str,
        difficulties: Sequence[int] = (1, 2, 3, 4),
        num_facts: int = 16,
    ) -> None:
        """Args:
        difficulties: numbers of hops.
        num_facts: facts that a prompt shows, those of the walk included.
        """
        self.domain, self.environment, self.difficulties = domain, environment, tuple(difficulties)
        self._graph, self._num_facts = graph, num_facts

    def draw(self, difficulty: int, rng: Random) -> Task:
        walk = self._graph.walk(difficulty, rng)
        facts = self._shown(walk, rng)
        shown = " ".join(f"the {fact.relation} of {fact.subject} is {fact.object}." for fact in facts)
        asked = question(walk)
        content = f"Facts: {shown}\nQuestion: who is {asked}? Answer with the name alone."
        metadata = {"start": walk.start, "relations": list(walk.relations), "facts": [list(fact) for fact in facts]}
        return Task(({"role": "user", "content": content},), walk.end, difficulty, metadata, question=asked)

    def _shown(self, walk: Walk, rng: Random) -> list[Fact]:
        """The facts of the walk among others; the graph has no other object for any step of the walk."""
        others = [fact for fact in self._graph.facts if fact not in set(walk.facts)]
        facts = [*walk.facts, *rng.sample(others, min(len(others), max(0, self._num_facts - len(walk.facts))))]
        rng.shuffle(facts)
        return facts


def question(walk: Walk) -> str:
    """'the rival of the mentor of Dabo' for the hops mentor, rival."""
    return "".join(f"the {relation} of " for relation in reversed(walk.relations)) + walk.start
