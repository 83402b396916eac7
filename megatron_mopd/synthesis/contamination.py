"""Overlap of tasks with held-out ones: the same text, the same question, or too many of the same n words in a row.

The n-gram test is the field's (GPT-3 used 13 words): a task is contaminated if at least `max_share` of its n-grams
occur among the held-out ones; of a text of fewer than n words the whole counts. White space and case do not.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_mopd.errors import UserError
from megatron_mopd.synthesis.task import Task


class HeldOut:
    """What tasks of other sets must not overlap with."""

    def __init__(self, ngram_words: int = 13, max_share: float = 0.5) -> None:
        if ngram_words < 1 or not 0 < max_share <= 1:
            raise UserError(
                f"decontamination: ngram_words={ngram_words} must be at least 1, max_share={max_share} in (0, 1]"
            )
        self._n, self._max_share = ngram_words, max_share
        self._texts: set[str] = set()
        self._questions: set[str] = set()
        self._ngrams: set[tuple[str, ...]] = set()

    def add(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self._texts.add(task.text)
            if task.question is not None:
                self._questions.add(task.question)
            self._ngrams.update(self._ngrams_of(task))

    def share(self, task: Task) -> float:
        """Share of the task's n-grams that are held out; 1.0 if its whole text or its question is."""
        if task.text in self._texts or task.question in self._questions:
            return 1.0
        ngrams = self._ngrams_of(task)
        return sum(ngram in self._ngrams for ngram in ngrams) / max(1, len(ngrams))

    def is_contaminated(self, task: Task) -> bool:
        return self.share(task) >= self._max_share

    def _ngrams_of(self, task: Task) -> list[tuple[str, ...]]:
        words = task.text.split()
        if len(words) < self._n:
            return []
        return [tuple(words[i : i + self._n]) for i in range(len(words) - self._n + 1)]
