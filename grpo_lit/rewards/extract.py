r"""Finds the final answer in a response.

The order, and the first that applies decides:

1. Nothing inside ``<think>...</think>`` counts. After an unclosed ``<think>`` there is no answer; where the opening tag
   was in the prompt, only what follows the last ``</think>`` counts. Text after an end-of-turn token doesn't count.
2. The last closed ``\boxed{...}``. Boxes joined by nothing but "and", "or" or a comma are one answer of several parts.
   If a box was opened and none closed, there is no answer.
3. The last ``<answer>...</answer>``.
4. The line after the last ``####``.
5. What follows the last "answer is", "answer:" or "A:".
6. The whole response, if it is short and no sentence.
7. The last mathematics or number, whichever ends later. "12 or 13" is taken as a whole.

Every step is one pass over the text, so a megabyte of braces takes milliseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from .normalize import clean, without_emphasis

Source = Literal["boxed", "answer tag", "####", "phrase", "whole response", "last value", "none"]

MAX_RESPONSE_CHARS = 400_000
"""Of a longer response only the end is read."""

_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_END_OF_TURN = re.compile(
    r"<\|(?:im_end|im_start|endoftext|eot_id|end_of_text|end|user)\|>|</s>|<｜end▁of▁sentence｜>"
)
_LEADING_TOKENS = re.compile(r"\s*(?:<\|im_start\|>\s*assistant|<｜Assistant｜>|<s>)\s*")
_BOX_OR_BRACE = re.compile(r"\\{1,3}(?:boxed|fbox)\s*(\{|[^\s{}\\$.,;:]+)|\\[\\{}]|[{}]")
_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.IGNORECASE | re.DOTALL)
_PHRASE = re.compile(
    r"(?:\banswer(?:\s+(?:to|of|for)\b[^.\n]{0,80}?)?\s*(?:is|was|be|are|equals|:|=)|^\s*A:|\bsolution\s+is\s*:?)"
    r"\s*(?:that\s+|therefore\s+|thus\s+|simply\s+|approximately\s+|about\s+|exactly\s+)?:?[ \t]*\n?[ \t]*(?P<tail>[^\n]+)",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"(?<=[^\s.A-Z])\.(?:\s|$)|(?<=[A-Z])\.(?:\s|$)|[!?](?:\s+[A-Z]|$)")
_MATH = re.compile(
    r"\$\$(?P<a>(?:[^$\\]|\\.)+?)\$\$|\\\[(?P<b>.+?)\\\]|\\\((?P<c>.+?)\\\)|(?<![\\$])\$(?P<d>(?:[^$\n\\]|\\.)+?)\$(?![0-9])",
    re.DOTALL,
)
_NUMERAL = r"-?(?:\\?\$ ?)?-?(?:[0-9]+(?:[,\u00a0 ][0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)"
_BARE_VALUE = re.compile(
    rf"(?<![\w.\\^_{{/])(?P<value>-?\\frac\{{-?[0-9]+\}}\{{[0-9]+\}}|{_NUMERAL}(?: ?[/:] ?[0-9]+(?:\.[0-9]+)?)?"
    rf"(?: or (?:maybe |perhaps |even )?{_NUMERAL})*)(?P<unit> ?(?:\\?%|percent\b|pct\b))?"
)
_PROSE = re.compile(r"(?<![\\a-zA-Z0-9)])[a-zA-Z]{3,}")
_MATH_WORDS = frozenset(
    "and or sqrt pi sin cos tan cot sec csc log exp frac inf infty infinity min max".split()
)
_JOINT_NOISE = re.compile(r"\\[()\[\],;:! ]|\\(?:text|quad|qquad|mathrm)|[\s${}\\]|~")
_JOINT = re.compile(r"(?:,|;|and|or|&)+", re.IGNORECASE)
_LOOSE_JOINT = re.compile(
    r"(?:.*[^a-zA-Z])?(?:and|or|,|;)(?:[a-zA-Z](?:_?[0-9])?(?:\([a-z]\))?=)?", re.IGNORECASE | re.DOTALL
)
_SECOND_THOUGHTS = re.compile(
    r"\b(?:wait|actually|no|not|but|then|hmm|instead|correct|mistake|sorry|rather)\b", re.I
)


@dataclass(frozen=True)
class Extraction:
    """Where the final answer was found.

    Attributes:
        text: the answer as written; None if there is none.
        source: which rule found it.
        reason: why there is none.
        joined: the same with boxes joined more freely ("(3, 3) for part (a) and (1, 1)"): to be used only where the
            gold answer has several parts, so that it can't help a guess.
    """

    text: str | None
    source: Source = "none"
    reason: str = ""
    joined: str | None = None


def final_answer(response: str) -> Extraction:
    """Finds the final answer; the rules are in this module's docstring."""
    visible = visible_text(response[-MAX_RESPONSE_CHARS:])
    if visible is None:
        return Extraction(None, reason="the response ends inside <think>")
    boxes, unclosed = find_boxes(visible)
    if boxes:
        return _from_boxes(visible, boxes)
    if unclosed:
        return Extraction(None, reason=r"a \boxed{ was opened and never closed")
    if not visible.strip():
        return Extraction(None, reason="the response is empty")
    tags = _ANSWER_TAG.findall(visible) if "nswer>" in visible.lower() else []
    if tags:
        return _found(tags[-1], "answer tag")
    visible = (
        without_emphasis(clean(visible))
        if not visible.isascii() or "**" in visible or "__" in visible
        else visible
    )
    if "####" in visible:
        return _found(visible.rpartition("####")[2].strip().partition("\n")[0], "####")
    return _from_prose(visible.strip())


@lru_cache(maxsize=4096)
def gold_answer(gold: str) -> str:
    r"""The answer in a gold text: plain, ``#### 72`` behind a solution, boxed, or stated at the end of a long solution.

    Gold text is trusted: all its joined boxes count, and a box that was never closed is read to the end.
    """
    boxes, unclosed = find_boxes(gold)
    if boxes:
        found = _from_boxes(gold, boxes)
        return found.joined or found.text or ""
    if unclosed:
        return gold.rpartition("boxed{")[2]
    if "####" in gold:
        return gold.rpartition("####")[2].strip()
    return (final_answer(gold).text or "") if len(gold) > 300 else gold.strip()


def visible_text(response: str) -> str | None:
    """The response without its thinking; None if it ends within."""
    first = _END_OF_TURN.search(response, pos=len(_leading(response)))
    if first:
        response = response[: first.start()]
    if "think" not in response and "THINK" not in response.upper():
        return response
    kept, start, inside = [], 0, False
    for tag in _THINK.finditer(response):
        if not tag[1] and not inside:
            kept.append(response[start : tag.start()])
            inside = True
        elif tag[1]:
            # Without an opening tag, all before it was thinking too: the prompt had opened it.
            kept = kept if inside else []
            inside, start = False, tag.end()
    return None if inside else "".join([*kept, response[start:]])


def _leading(response: str) -> str:
    match = _LEADING_TOKENS.match(response)
    return match[0] if match else ""


def find_boxes(text: str) -> tuple[list[tuple[int, int, str]], bool]:
    r"""Start, end and content of each outermost closed box, in order; and whether some box was never closed.

    >>> find_boxes(r"\boxed{a{b}} \boxed{c")
    ([(0, 12, 'a{b}')], True)
    """
    boxes: list[tuple[int, int, str]] = []
    stack: list[
        tuple[int, int] | None
    ] = []  # for each open brace: None, or where its box and its content start
    if "boxed" not in text and "fbox" not in text:
        return boxes, False
    for token in _BOX_OR_BRACE.finditer(text):
        if token[1] == "{":
            stack.append((token.start(), token.end()))
        elif token[1]:
            boxes.append((token.start(), token.end(), token[1]))
        elif token[0] == "{":
            stack.append(None)
        elif token[0] == "}" and stack:
            opened = stack.pop()
            if opened is not None:
                while boxes and boxes[-1][0] > opened[0]:
                    boxes.pop()  # inside of this one
                boxes.append((opened[0], token.end(), text[opened[1] : token.start()]))
    return boxes, any(stack)


def _from_boxes(text: str, boxes: list[tuple[int, int, str]]) -> Extraction:
    strict, loose = [boxes[-1][2].strip()], [boxes[-1][2].strip()]
    follows = True
    for (_, end, content), (start, _, _) in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        between = text[end:start]
        joint = _joint(between)
        follows = follows and joint == "strict"
        if joint == "none":
            break
        loose.insert(0, content.strip())
        if follows:
            strict.insert(0, content.strip())
        if len(loose) > 32:
            break
    joined = ", ".join(loose) if len(loose) > len(strict) else None
    if not strict[-1]:
        return Extraction(None, reason="the last box is empty")
    return Extraction(", ".join(strict), "boxed", joined=joined)


def _joint(between: str) -> Literal["strict", "loose", "none"]:
    """How two boxes are joined by the text between them."""
    if len(between) > 80:
        return "none"
    bare = _JOINT_NOISE.sub("", between)
    if _JOINT.fullmatch(bare) or (not bare and "quad" in between):
        return "strict"
    if bare and not any(character.isalnum() for character in bare):
        return "loose"
    return "loose" if _LOOSE_JOINT.fullmatch(bare) and not _SECOND_THOUGHTS.search(between) else "none"


def _found(text: str, source: Source) -> Extraction:
    text = text.strip()
    return Extraction(text, source) if text else Extraction(None, reason=f"nothing follows the last {source}")


def _from_prose(text: str) -> Extraction:
    phrases = list(_PHRASE.finditer(text[-20_000:]))
    if phrases:
        tail = phrases[-1]["tail"].strip()
        sentence = _first_sentence(tail)
        # "answer is to your question: the total is 5" holds its answer at the end, as any sentence does.
        candidate = sentence if not _is_sentence(sentence) else _last_value(sentence) or sentence
        return _found(candidate, "phrase")
    if len(text) <= 200 and "\n" not in text and not _is_sentence(text):
        return _found(text, "whole response")
    value = _last_value(text[-20_000:])
    if value is None:
        return Extraction(None, reason="no box, no answer phrase and no number")
    return Extraction(value, "last value")


def _first_sentence(tail: str) -> str:
    """Up to the full stop; one inside mathematics or a decimal ends nothing."""
    hidden = _MATH.sub(lambda match: "x" * len(match[0]), tail)
    end = _SENTENCE_END.search(hidden)
    return (tail[: end.start()] if end else tail).strip(' "*')


def _is_sentence(text: str) -> bool:
    """Whether words say more than an answer does; words after a number are its unit."""
    bare = _MATH.sub(" ", text)
    words = [word for word in _PROSE.findall(bare) if word.lower() not in _MATH_WORDS]
    if not re.search(r"[0-9$\\]", text):
        return len(words) > 6
    if re.match(rf"{_NUMERAL}(?!.*[0-9])", bare.strip()) and len(words) <= 8:
        return False
    return (
        bool(words) and re.fullmatch(r"\s*(?:percent(?:age)?|pct)\s*", bare) is None and "\\text" not in text
    )


def _last_value(text: str) -> str | None:
    """The last mathematics between delimiters or the last bare number, whichever ends later."""
    best: tuple[int, str] | None = None
    spans = []
    for match in _MATH.finditer(text):
        content = next(group for group in match.groups() if group is not None)
        words = [word for word in _PROSE.findall(re.sub(r"\\[a-zA-Z]+\{[^{}]*\}|\\[a-zA-Z]+", " ", content))]
        if match["d"] is not None and any(word.lower() not in _MATH_WORDS for word in words):
            continue  # two dollar amounts and the words between them
        spans.append(match.span())
        best = (match.end(), content.strip())
    numbers = [m for m in _BARE_VALUE.finditer(text) if not any(a <= m.start() < b for a, b in spans[-50:])]
    if numbers and (best is None or numbers[-1].end() > best[0]):
        return (numbers[-1]["value"] + (numbers[-1]["unit"] or "")).strip()
    return best[1] if best else None
