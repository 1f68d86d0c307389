"""Brings an answer's text to one spelling: Unicode to LaTeX, and LaTeX to its plain forms.

Pure string work, linear in the length of the text, with no knowledge of what the answer means. The worker
process loads this file too, so it imports nothing but the standard library.
"""

from __future__ import annotations

import re


def _pairs(keys: str, values: list[str]) -> dict[int, str]:
    return {ord(key): value for key, value in zip(keys, values, strict=True)}


_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_GREEK = ["pi", "theta", "alpha", "beta", "gamma", "lambda", "mu", "omega", "phi"]
_VULGAR = ["12", "13", "23", "14", "34", "15", "18"]
_INVISIBLE = [*range(0x09), 0x0B, *range(0x0E, 0x20), *range(0x7F, 0xA0), 0xAD, 0x061C, 0x180E, 0xFEFF]
_INVISIBLE += [
    *range(0x200B, 0x2010),
    *range(0x202A, 0x202F),
    *range(0x2060, 0x2070),
    *range(0xFE00, 0xFE10),
    *range(0xE000, 0xF900),
]
_CHARACTERS: dict[int, str | None] = {
    **dict.fromkeys(_INVISIBLE),
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full-width forms
    **dict.fromkeys([0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000], " "),
    **dict.fromkeys(map(ord, "−‐‑‒–—﹣"), "-"),
    **_pairs("×⋅·∙÷∗∕⁄", [r"\times ", r"\cdot ", r"\cdot ", r"\cdot ", r"\div ", "*", "/", "/"]),
    **_pairs("≤≥⩽⩾≠≈≡", [r"\le ", r"\ge ", r"\le ", r"\ge ", r"\ne ", r"\approx ", r"\equiv "]),
    **_pairs("∞∪∩∈±∨∧", [r"\infty ", r"\cup ", r"\cap ", r"\in ", r"\pm ", " or ", " and "]),
    **_pairs("πθαβγλμωφ", [rf"\{name} " for name in _GREEK]),
    **_pairs("½⅓⅔¼¾⅕⅛", [rf"\frac{{{n[0]}}}{{{n[1]}}}" for n in _VULGAR]),
    **_pairs("→⇒≃≅∼", [r"\to ", r"\to ", r"\approx ", r"\approx ", r"\approx "]),
    **_pairs("ℝ∅′’‘“”。，：∶", [r"\mathbb{R}", r"\emptyset ", "'", "'", "'", '"', '"', ".", ",", ":", ":"]),
}
_ROOT_SIGN = re.compile(r"√\s*([0-9]+|[a-zA-Z]|\{[^{}]*\}|\([^()]*\))")

_DOUBLED_BACKSLASH = re.compile(r"\\\\(?=[a-zA-Z])")
_DOLLAR_AMOUNT = re.compile(r"\s*-?\$\s*-?[0-9.]")
_JOINED_DIGITS = re.compile(
    r"(?<=[0-9])\{,\}(?=[0-9])"  # 1{,}000
    r"|(?<=[0-9]),(?:\\!\s*)+(?=[0-9])"  # 1,\!000
    r"|(?<=[0-9])(?:\\[,!;: ]|~)(?=[0-9]{3}(?![0-9]))"  # 1\,000
)
_SPACING = re.compile(r"(?<!\\)\\[,;:!> ()\[\]]|\\(?:quad|qquad|displaystyle|textstyle|limits|hfill|newline)|[~\s]")
_SIZED = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|middle)(?![a-zA-Z])\s*(?:\.(?![0-9]))?")
_FONTS = re.compile(
    r"\\(?:text|mathrm|textrm|mathbf|textbf|mathit|textit|mathsf|mbox|hbox|operatorname|mathtt|texttt|textnormal"
    r"|emph|boldsymbol|bold|bm|underline)\*?\s*\{([^{}]*)\}"
)
_LOOKS = re.compile(r"\\(?:text)?color\s*\{[a-zA-Z!0-9]*\}|\\(?:large|Large|LARGE|huge|Huge|small)(?![a-zA-Z])")
_OVER = re.compile(r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}")
_OLD_FONTS = re.compile(r"\{\s*\\(?:rm|bf|it|tt|sf)\s+([^{}]*)\}")
_CONNECTIVE = re.compile(r"[,;\s]*(and|or|&)[,;\s]*")
_MATH_IN_TEXT = re.compile(r"[-+]?[0-9][0-9.,/]*|[a-zA-Z]|.*\\.*")
_COMMANDS = [
    (re.compile(rf"\\(?:{old})(?![a-zA-Z])"), new)
    for old, new in [
        ("dfrac|tfrac|cfrac", r"\\frac"),
        ("leqslant|leq|le", r"\\le "),
        ("geqslant|geq|ge", r"\\ge "),
        ("neq|ne", r"\\ne "),
        ("lt", "<"),
        ("gt", ">"),
        ("lbrace", r"\\{"),
        ("rbrace", r"\\}"),
        ("lvert|rvert|vert|mid", "|"),
        ("lor|vee", " or "),
        ("land", " and "),
        ("colon", ":"),
        ("degree|degrees", "°"),
        ("percent", "%"),
        ("dotsc|dotsb|ldots|dots|cdots", "..."),
        ("implies|Rightarrow|rightarrow", r"\\to "),
        ("boxed|fbox|therefore", " "),
        ("varnothing", r"\\emptyset "),
        (r"bar(?=\{[0-9])", r"\\overline"),  # 0.\bar{3}
    ]
]
_PLAIN_NAMES = re.compile(
    r"(?<![\\a-zA-Z])(sqrt|pi|infty|infinity|arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp"
    r"|theta|alpha|beta|gamma|lambda|omega)(?![a-zA-Z])"
)
_EMPHASIS = re.compile(r"(?<![\w)\]}*])(\*\*|__)(?=\S)([^*_\n]+)(?<=\S)\1(?![\w(*])")
_MINUS = re.compile(r"(?<![\w)\]}%$] )\b(?:minus|negative) ?(?=[0-9.$\\])", re.IGNORECASE)
_RANGE = re.compile(r"(?<![-+*/^=_0-9.(] )(?<![-+*/^=_0-9.(])([0-9]+(?:\.[0-9]+)?) ?~ ?(?=[0-9])")
_ABOUT = re.compile(r"(?<![a-zA-Z}~])~ ?(?=-?[0-9.])(?![0-9]{3}(?![0-9]))")
_COMPARED = re.compile(
    r"(?<=\b[a-z]) (?:(?:is|must be) )?(?:(greater|more|larger)|less|smaller) than (or equal to )?(?=[-0-9.$\\])",
    re.IGNORECASE,
)
_SPACE_NOT_BETWEEN_WORDS = re.compile(r"(?<![0-9a-zA-Z]) | (?![0-9a-zA-Z])")


def clean(text: str) -> str:
    r"""Replaces Unicode look-alikes by ASCII or LaTeX; drops control, zero-width and direction marks.

    >>> clean("−5 \u200b≤ x²")
    '-5 \\le  x^{2}'
    """
    if text.isascii() and text.isprintable():
        return text
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: "^{" + m[0].translate(_RAISED) + "}", text)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m[0].translate(_LOWERED) + "}", text)
    text = _ROOT_SIGN.sub(lambda m: r"\sqrt{" + m[1].strip("{}()") + "}", text)
    return text.translate(_CHARACTERS)


def without_emphasis(text: str) -> str:
    """Takes Markdown's bold marks off, but leaves Python's power operator alone.

    >>> without_emphasis("**73** is not 2**30**5")
    '73 is not 2**30**5'
    """
    return _EMPHASIS.sub(r"\2", text) if "**" in text or "__" in text else text


def in_signs(text: str) -> str:
    """`clean`, without emphasis, and with words for a sign or an order as the sign.

    >>> in_signs("**negative 8**"), in_signs("x is less than or equal to 2"), in_signs("9 minus 1")
    ('-8', 'x <= 2', '9 minus 1')
    """
    if "~" in text:
        text = _ABOUT.sub(r"\\approx ", _RANGE.sub(r"\1 to ", text))  # 8~10 is 8 to 10, 1+7~8 about 8
    text = _MINUS.sub("-", without_emphasis(clean(text)))
    return _COMPARED.sub(lambda m: f" {'>' if m[1] else '<'}{'=' if m[2] else ''} ", text)


def normalise(text: str) -> str:
    r"""One spelling for one answer: no delimiters, sizes or fonts; known commands under one name.

    Words in a text command stay marked as ``\text{...}``, a dollar sign that is left is a currency, and ``°``
    stands for degrees.

    >>> normalise(r"$\left(\dfrac{1}{2},\; 1{,}000\right)$.")
    '(\\frac{1}{2}, 1000)'
    >>> normalise(r"\$60 \mathrm{~per~hour}")
    '$60 \\text{per hour}'
    """
    text = in_signs(text)
    if "matrix" not in text and "array" not in text and "cases" not in text:
        text = _DOUBLED_BACKSLASH.sub(r"\\", text).replace("\\\\", " ")
    text = _without_math_dollars(text)
    text = _JOINED_DIGITS.sub("", text)
    text = _SIZED.sub("", text)
    text = _SPACING.sub(" ", text)
    if "\\" in text:
        text = text.replace(r"\%", "%").replace(r"\&", "&").replace(r"\#", "#").replace(r"\_", "_")
        text = _OLD_FONTS.sub(r"\\text{\1}", text)
        text = _OVER.sub(r"\\frac{\1}{\2}", _LOOKS.sub("", text))
        text = _FONTS.sub(_plain_text, _FONTS.sub(_plain_text, text))  # one within another
        for pattern, new in _COMMANDS:
            text = pattern.sub(new, text)
        text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "°", text)
        text = re.sub(r"\\\{ *\\\}", r"\\emptyset ", text)
    text = re.sub(r"!=", r"\\ne ", text).replace("=>", r"\to ").replace("<=", r"\le ").replace(">=", r"\ge ")
    text = re.sub(r"(?<=[0-9]) ?[xX] ?(?=10\^)", r"\\times ", text)
    text = _PLAIN_NAMES.sub(lambda m: "\\" + m[1].replace("infinity", "infty"), text)
    text = re.sub(r"\\infty\b|(?<![\\a-zA-Z])inf(?![a-zA-Z])", r"\\infty ", text)
    text = re.sub(r"\s+", " ", text).strip(' "`')
    text = re.sub(r"(?<=\bhundred )and (?=[a-z])", "", text)  # one hundred and five
    text = re.sub(r"^[:=]+ *|(?:(?<!\.)\.|[,;:\\])+ *$", "", text).strip()
    text = re.sub(r"^'(.*)'$", r"\1", text)
    return re.sub(r"([(\[{]) +| +([)\]},])", r"\1\2", text)


def canonical(text: str) -> str:
    r"""Drops the spaces of a normalised text, except between two words or digits.

    >>> canonical(r"( 1 , 2 )"), canonical("1 2")
    ('(1,2)', '1 2')
    """
    return _SPACE_NOT_BETWEEN_WORDS.sub("", text)


def _without_math_dollars(text: str) -> str:
    """Removes math delimiters; what stays a dollar sign is money."""
    if "$" not in text:
        return text
    text = text.replace(r"\$", "\x01")
    if text.count("$") % 2 and _DOLLAR_AMOUNT.match(text):
        text = text.replace("$", "\x01", 1)
    return text.replace("$", " ").replace("\x01", "$")


def _plain_text(match: re.Match[str]) -> str:
    inner = match[1].strip()
    connective = _CONNECTIVE.fullmatch(inner)
    if connective:
        return f" {connective[1]} ".replace("&", "and")
    if _MATH_IN_TEXT.fullmatch(inner) and not (match[0].startswith(r"\text{") and inner.isalpha()):
        return f" {inner} "
    return rf"\text{{{inner}}}" if inner else " "
