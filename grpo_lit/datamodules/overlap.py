"""Duplicates within a dataset and overlap between two, by shared word n-grams.

Two questions are the same if they have the same words and numbers. They are near-duplicates if the shorter one shares
at least `NEAR_SHARE` of its n-grams with the other: the same story with other numbers, a reworded sentence. n = 8 words
with numbers made alike, after the decontamination of evaluation sets (Brown et al. 2020 take 13 words; GSM8K's
questions are short). Texts of fewer words are only compared whole.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

NGRAM = 8
MIN_WORDS = 4
NEAR_SHARE = 0.5
COMMON = 50
"""An n-gram in more questions than this is boilerplate, such as an instruction, and says nothing."""
_WORD = re.compile(r"[a-z]+|[0-9]+(?:\.[0-9]+)?|[^\sa-z0-9.,;:!?'\"()]", re.IGNORECASE)


class Pair(NamedTuple):
    """Two questions that are too much alike."""

    first: int
    """Position in the first list (of duplicates: the earlier one)."""
    second: int
    """Position in the second list."""
    share: float
    """Share of the shorter question's n-grams that the other has."""
    equal: bool
    """The same words and numbers."""


def words(text: str) -> tuple[str, ...]:
    """Words, numbers and operators in lower case, punctuation left out.

    >>> words("Tom has 3,000 apples. 2+2?")
    ('tom', 'has', '3000', 'apples', '2', '+', '2')
    """
    return tuple(_WORD.findall(re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", text.lower())))


def ngrams(tokens: Sequence[str], n: int = NGRAM) -> set[int]:
    """Hashes of all n-grams with `MIN_WORDS` words or more, numbers made alike; of a short text, none."""
    masked = ["#" if token[0].isdigit() else token for token in tokens]
    grams = (masked[i : i + n] for i in range(len(masked) - n + 1))
    return {hash(tuple(gram)) for gram in grams if sum(token.isalpha() for token in gram) >= MIN_WORDS}


def find_duplicates(questions: Sequence[str], *, near: bool = True) -> list[Pair]:
    """Pairs of questions within one list, each later one with the earlier one that it resembles most."""
    index = _Index()
    pairs = []
    common = _common(map(words, questions)) if near else set()
    for position, question in enumerate(questions):
        tokens = words(question)
        found = index.closest(tokens, common, near)
        if found is not None:
            pairs.append(Pair(found[0], position, *found[1:]))
        index.add(position, tokens, common, near)
    return pairs


def find_overlap(train: Sequence[str], held_out: Sequence[str], *, near: bool = True) -> list[Pair]:
    """For each held-out question that resembles a training question, the one that it resembles most."""
    index = _Index()
    common = _common(map(words, train)) if near else set()
    for position, question in enumerate(train):
        index.add(position, words(question), common, near)
    pairs = []
    for position, question in enumerate(held_out):
        found = index.closest(words(question), common, near)
        if found is not None:
            pairs.append(Pair(found[0], position, *found[1:]))
    return pairs


def _common(texts: Iterable[Sequence[str]]) -> set[int]:
    """n-grams that occur in more than `COMMON` texts."""
    counts: Counter[int] = Counter()
    for tokens in texts:
        counts.update(ngrams(tokens))
    return {gram for gram, count in counts.items() if count > COMMON}


class _Index:
    """Texts seen so far, by their words and by their n-grams."""

    def __init__(self) -> None:
        self.whole: dict[tuple[str, ...], int] = {}
        self.grams: dict[int, list[int]] = defaultdict(list)
        self.sizes: dict[int, int] = {}

    def add(self, position: int, tokens: tuple[str, ...], common: set[int], near: bool) -> None:
        self.whole.setdefault(tokens, position)
        own = ngrams(tokens) - common if near else set()
        self.sizes[position] = len(own)
        for gram in own:
            self.grams[gram].append(position)

    def closest(self, tokens: tuple[str, ...], common: set[int], near: bool) -> tuple[int, float, bool] | None:
        """Position, share and equality of the text that these words resemble most; None if none does."""
        if tokens in self.whole:
            return self.whole[tokens], 1.0, True
        own = ngrams(tokens) - common if near else set()
        shared = Counter(position for gram in own for position in self.grams.get(gram, ()))
        best: tuple[int, float] | None = None
        for position, count in shared.items():
            share = count / min(len(own), self.sizes[position])
            if share >= NEAR_SHARE and (best is None or (share, -position) > (best[1], -best[0])):
                best = position, share
        return None if best is None else (*best, False)
