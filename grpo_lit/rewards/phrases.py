"""Answers that are no mathematics: choice letters, yes and no, "can't be determined", dates.

The gold answer says which of these is asked for; `same_phrase` has nothing to say about any other.
"""

from __future__ import annotations

import re

from .leaves import plain_words

_LETTER = r"(?:\\text\{ *)?(?:(?:[Oo]ption|[Cc]hoice) *)?\(? *([A-J]) *"
_CHOICE = re.compile(rf"{_LETTER}(?:\)|\}}|\.|:|$).*")
_OTHER_CHOICE = re.compile(r"(?<![a-zA-Z])([A-J])(?=[).:,;?}\]]|$)")
_BARE_CHOICE = re.compile(rf"{_LETTER}\)?\.? *\}}?")
_UNANSWERABLE = re.compile(
    r"(?:none|n/?a|unanswerable|undetermined|indeterminate|unknown"
    r"|(?:it is )?impossible to (?:determine|tell|know|answer).*"
    r"|(?:there is |it is )?(?:not enough|insufficient|missing) (?:information|data|info).*"
    r"|(?:the answer |it |this )?(?:cannot|can't|can not|could not) be"
    r" (?:determined|answered|calculated|known|solved|computed).*)"
)
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_DATE = re.compile(
    rf"(?:([a-z]+day),? )?(?:({_MONTHS})[a-z]*\.? ([0-9]{{1,2}})(?:st|nd|rd|th)?"
    rf"|(?:the )?([0-9]{{1,2}})(?:st|nd|rd|th)?(?: of)? ({_MONTHS})[a-z]*\.?)(?:,? ([0-9]{{4}}))?"
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")


def same_phrase(gold: str, answer: str) -> bool | None:
    r"""Compares two normalised answers if the gold one is of a kind above; None if it isn't.

    >>> same_phrase("B", r"\text{(B)} 12"), same_phrase("None", "It cannot be determined")
    (True, True)
    >>> same_phrase("12", "12")
    """
    choice = _BARE_CHOICE.fullmatch(gold)
    chosen = _CHOICE.fullmatch(answer) if choice else None
    if choice and chosen:
        others = set(_OTHER_CHOICE.findall(answer[chosen.end(1) :])) - {chosen[1]}
        return chosen[1] == choice[1] and not others  # a list of the options chooses none
    if is_yes_or_no(gold):
        said = re.findall(r"\b(?:yes|no|true|false)\b", answer.lower())
        return (
            set(said) == {plain_words(gold)}
            and re.match(rf"(?:\\text\{{ *)?{said[0]}\b(?! *\w)", answer.lower()) is not None
        )
    if _UNANSWERABLE.fullmatch(plain_words(gold) or ""):
        return _UNANSWERABLE.fullmatch(_TEXT.sub(r"\1", answer).lower().strip(" .")) is not None
    ours, theirs = _date(gold), _date(answer)
    if ours and theirs:
        return all(a == b for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None)
    return None


def is_yes_or_no(gold: str) -> bool:
    """Whether a normalised gold answer is yes, no, true or false."""
    return plain_words(gold) in ("yes", "no", "true", "false")


def _date(text: str) -> tuple[str | None, ...] | None:
    """Weekday, month, day and year; None for those left out."""
    if not re.search("[a-zA-Z]{3}", text):
        return None
    match = _DATE.fullmatch(_TEXT.sub(r"\1", text).lower())
    return (match[1], match[2] or match[5], match[3] or match[4], match[6]) if match else None
