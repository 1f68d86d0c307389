r"""Finds the final answer in a response.

The order, and the first that applies decides:

1. Nothing inside ``<think>...</think>`` counts. After an unclosed ``<think>`` there is no answer; where the
   opening tag was in the prompt, only what follows the last ``</think>`` counts. Text after an end-of-turn
   token doesn't count.
2. The last closed ``\boxed{...}``. Boxes joined by nothing but "and", "or" or a comma are one answer of
   several parts. If a box was opened and none closed, there is no answer.
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

from .normalize import in_signs
from .units import unit_named

Source = Literal["boxed", "answer tag", "####", "phrase", "whole response", "last value", "none"]

MAX_RESPONSE_CHARS = 400_000
"""Of a longer response only the end is read."""

_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_END_OF_TURN = re.compile(r"<\|(?:im_end|im_start|endoftext|eot_id|end_of_text|end|user)\|>|</s>|<｜end▁of▁sentence｜>")
_LEADING_TOKENS = re.compile(r"\s*(?:<\|im_start\|>\s*assistant|<｜Assistant｜>|<s>)\s*")
_BOX_OR_BRACE = re.compile(r"\\{1,3}(?:boxed|fbox)\s*(\{|[^\s{}\\$.,;:]+)|\\[\\{}]|[{}]")
_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.IGNORECASE | re.DOTALL)
_PHRASE = re.compile(
    r"(?:\banswers?(?:\s+(?:to|of|for)\b[^.\n]{0,80}?)?\s*(?:is|was|be|are|equals|:|=)|^ *A:"
    r"|\bsolution\s+is\b)\s*(?:(?:that|therefore|thus|simply|approximately|about|exactly)\s+)?:?\s*(?P<tail>[^\n]+)",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"(?<=[^\s.A-Z])\.(?:\s|$)|(?<=[A-Z])\.(?:\s|$)|[!?](?:\s+[A-Z]|$)")
_MATH = re.compile(
    r"\$\$(?P<a>(?:[^$\\]|\\.)+?)\$\$|\\\[(?P<b>(?:(?!\\[\[\]]).)+)\\\]|\\\((?P<c>(?:(?!\\[()]).)+)\\\)"
    r"|(?<![\\$])\$(?P<d>(?:[^$\n\\]|\\.)+?)\$(?![0-9])",
    re.DOTALL,
)
_NUMERAL = r"-?(?:\\?\$ ?)?-?(?:[0-9]+(?:[,\u00a0 ][0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)"
# In prose a value goes on until a word or the end of a sentence: signs, digits with letters at them, and the few words
# that join numbers or make another of one (7 to 8, not 8, more than 8, 8 squared) belong to it: comparison will see.
_ALTERING = (
    r"(?:(?:is|was|are) )?(?:not|wrong|incorrect)|isn't|wasn't|never|neither|between|under|below|above|over|minus"
    r"|negative|than|least|most|half|twice|double|triple|root|square|cube|squared|cubed|dozen|hundred|thousand|million|billion"
    r"|trillion|percent|pct"
)
_JOINING = (
    r"(?:[a-zA-Z]+ )?(?:or|nor|to)|(?:out )?of|and|through|by|but|plus|times|mod|xor|vs|versus|unless|instead|rather"
    r"|maybe|perhaps|possibly|even|also|either|x(?= ?\$?[0-9])|multiplied|divided|modulo|choose|less|increased"
    r"|decreased|reduced|added|subtracted|take away"
)
_VALUE = r"[\d\uE000-\uF8FF]"  # a digit, or mathematics, for which a character of the private area stands
_RUN = re.compile(
    rf"(?:(?<!\w)\w*{_VALUE}\w*|{_VALUE}|\b(?:{_ALTERING}|{_JOINING})\b|(?![.:?!](?:\s|$))[^\w\s\"]|[^\S\n])+",
    re.IGNORECASE,
)
_PUNCTUATION = r"[\s,:;=*#&"
_ENDS = re.compile(
    rf"^(?:{_PUNCTUATION}\]}}]|-(?=\s)|\b(?:{_JOINING})\b)+"
    rf"|(?<!{_PUNCTUATION}\[{{-])(?:{_PUNCTUATION}\[{{-]|\b(?:{_JOINING})\b)+$",
    re.IGNORECASE,
)
_UNIT = re.compile(r"(?:square |cubic )?[a-zA-Z]+(?:(?: per | an? |/)[a-zA-Z]+)?(?:\^\{?[23]\}?)?")
# A run of LaTeX without delimiters: it ends where a word, a new line or a sentence's punctuation stands.
_BARE_MATH = re.compile(
    r"(?:\\[a-zA-Z]+|\\[{}%]|[0-9]+(?:[.,][0-9]+)*|[-+*/^_=<>(){}\[\]|!]|(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])| +)+"
)
_PROSE = re.compile(r"(?<![\\a-zA-Z0-9)])[a-zA-Z]{3,}")
_SHORT_WORDS = re.compile(r"(?<![\\a-zA-Z])(?:so|it|is|we|of|to|he|be|as|by|if)(?![a-zA-Z])", re.IGNORECASE)
_MATH_WORDS = {"and", "or", "sqrt", "sin", "cos", "tan", "cot", "log", "exp", "inf", "infinity", "min", "max"}
_JOINT_NOISE = re.compile(r"\\[()\[\],;:! ]|\\(?:text|quad|qquad|mathrm)|[\s${}\\]|~")
_JOINT = re.compile(r"(?:,|;|and|or|&)+", re.IGNORECASE)
_LOOSE_JOINT = re.compile(
    r"(?:.*[^a-zA-Z])?(?:and|or|,|;)(?:[a-zA-Z](?:_?[0-9])?(?:\([a-z]\))?=)?", re.IGNORECASE | re.DOTALL
)
_RETRACTION = re.compile(r"[\W_]*(?:wait[,.!]* no|actually|oops|sorry|scratch that|correction|no(?=[,.:!;]))\b", re.I)
_REASON = re.compile(r"(?<=[0-9$)}%*a-z]),?\s+(?:since|because|given that|which)\b", re.IGNORECASE)
_OPENING = re.compile(r"(yes|no|true|false)\b", re.IGNORECASE)
_SECOND_THOUGHTS = re.compile(r"\b(?:wait|actually|no|not|but|then|hmm|instead|correct|mistake|sorry|rather)\b", re.I)


@dataclass(frozen=True)
class Extraction:
    """Where the final answer was found.

    Attributes:
        text: the answer as written; None if there is none.
        source: which rule found it.
        reason: why there is none.
        joined: the same with boxes joined more freely ("(3, 3) for part (a) and (1, 1)"): to be used only
            where the gold answer has several parts, so that it can't help a guess.
        opening: yes, no, true or false, if a response without box or answer phrase begins with it.
    """

    text: str | None
    source: Source = "none"
    reason: str = ""
    joined: str | None = None
    opening: str | None = None


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
    visible = in_signs(visible)
    if "####" in visible:
        return _found(visible.rpartition("####")[2].strip().partition("\n")[0], "####")
    return _from_prose(visible.strip())


@lru_cache(maxsize=4096)
def gold_answer(gold: str) -> str:
    r"""The answer in a gold text: plain, behind ``####``, boxed, or stated at the end of a long solution.

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
    stack: list[tuple[int, int] | None] = []  # for each open brace: None, or where its box and its content start
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
        rest = text[-20_000:][phrases[-1].start("tail") :].partition(sentence)[2]
        if _RETRACTION.match(rest) and _last_value(rest) is not None:
            return _from_prose(rest)  # The answer is 13. Wait, no: 12.
        if re.fullmatch(r"\(?[A-J]\)?", sentence):
            return _found(tail[:200], "phrase")  # with what follows the letter: perhaps the other options
        reason = _REASON.search(sentence)
        if reason and re.match(r"(?:[a-zA-Z] ?= ?)?(?:[^a-zA-Z]*[0-9]|\$|\\)", sentence):
            sentence = sentence[: reason.start()]  # 43, since 42 is even
        # "answer is to your question: the total is 5" holds its answer at the end, as any sentence does.
        candidate = sentence if not _is_sentence(sentence) else _last_value(sentence) or sentence
        return _found(candidate, "phrase")
    if len(text) <= 300 and "\n" not in text and not _is_sentence(text):
        return _found(text, "whole response")
    value = _last_value(text[-20_000:])
    first = _OPENING.match(text)
    opening = first[1] if first else None
    if value is None:
        return Extraction(None, reason="no box, no answer phrase and no number", opening=opening)
    return Extraction(value, "last value", opening=opening)


def _first_sentence(tail: str) -> str:
    """Up to the full stop; one inside mathematics or a decimal ends nothing."""
    hidden = _MATH.sub(lambda match: "x" * len(match[0]), tail)
    end = _SENTENCE_END.search(hidden)
    return (tail[: end.start()] if end else tail).strip(' "*')


def _is_sentence(text: str) -> bool:
    """Whether words say more than an answer does; words after a number are its unit."""
    bare = re.sub(r"\\(?:begin|end)\{[a-z]*\}", " ", _MATH.sub(" ", text))
    words = [word for word in _PROSE.findall(bare) if word.lower() not in _MATH_WORDS]
    words += _SHORT_WORDS.findall(bare)
    if not re.search(r"[0-9$\\]", text):
        return len(words) > 6
    if re.match(rf"{_NUMERAL}(?!.*[0-9])", bare.strip()) and len(words) <= 8:
        return False
    return bool(words) and re.fullmatch(r"\s*(?:percent(?:age)?|pct)\s*", bare) is None and "\\text" not in text


def _last_value(text: str) -> str | None:
    """The last mathematics, between delimiters or bare, or number, with all that belongs to it."""
    values: list[str] = []

    def hide(match: re.Match[str]) -> str:
        content = next(group for group in match.groups() if group is not None)
        words = _PROSE.findall(re.sub(r"\\[a-zA-Z]+\{[^{}]*\}|\\[a-zA-Z]+", " ", content))
        if match["d"] is not None and any(word.lower() not in _MATH_WORDS for word in words):
            return match[0]  # two dollar amounts and the words between them
        return _hidden(content, values)

    text = _MATH.sub(hide, text)
    bare = [run for run in _BARE_MATH.finditer(text) if re.search(r"\\[a-zA-Z]{2}", run[0])] if "\\" in text else []
    if bare:
        text = f"{text[: bare[-1].start()]} {_hidden(bare[-1][0], values)} {text[bare[-1].end() :]}"
    last = re.search(_VALUE, text[::-1])
    if last is None:
        return None
    position = len(text) - last.end()
    start, end = text.rfind("\n", 0, position) + 1, text.find("\n", position)
    line = text[start : end if end >= 0 else None]
    run = next(run for run in _RUN.finditer(line) if run.end() > position - start)
    value = _ENDS.sub("", run[0])
    if value.count("(") != value.count(")"):
        value = value.strip("() ")
    unit = _UNIT.match(line, run.end())
    if unit and unit[0] != "in" and run[0].endswith(value + " ") and unit_named(unit[0]):
        value += " " + unit[0]
    return re.sub("[\ue000-\uf8ff]", lambda match: f" {values[ord(match[0]) - 0xE000]} ", value).strip()


def _hidden(content: str, values: list[str]) -> str:
    """A character that stands for mathematics; 20,000 characters can't hold more spans than there are of these."""
    values.append(content.strip())
    return chr(0xE000 + len(values) - 1)
