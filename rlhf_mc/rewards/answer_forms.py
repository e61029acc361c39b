r"""Forms of mathematical answers that math-verify misreads: what math.py rewrites or decides before
it asks for computer algebra. Spelling (spaces, fonts, currency, repeating decimals, ...), bases,
units, percent signs, labels of multiple choice, words, brackets and lists.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from decimal import Decimal

_CHARACTERS = str.maketrans(
    {
        "°": "^\\circ ", "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "\\div ",
        "π": "\\pi ", "∞": "\\infty ", "√": "\\sqrt ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ",
        "∪": "\\cup ", "∅": "\\emptyset ", "²": "^2", "³": "^3", "½": "\\frac12", "⅓": "\\frac13",
        "⅔": "\\frac23", "¼": "\\frac14", "¾": "\\frac34", "…": "\\ldots ",
        **dict.fromkeys("€£¥₹", ""),
    }
)  # fmt: skip
_SPELLINGS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (
        r"(?:^US)?\\?[$]"
        r"|\\(?:pounds|euro|displaystyle|[lL]arge|boldsymbol|bm|bf|underline|left|right)(?![a-zA-Z])",
        "",
    ),
    (r"\\(?:text)?color\s*\{\w+\}", ""),
    (r"\\(?:text(?:bf|it|rm|sf|tt|normal)|mbox)(?![a-zA-Z])", r"\\text"),
    (r"\\(?:nice|s)frac(?![a-zA-Z])", r"\\frac"),
    (r"\\degree(?![a-zA-Z])", r"^\\circ"),
    (r"(\^ ?\{?\\circ ?\}?) ?(?:\\(?:text|mathrm) ?\{ ?[CF] ?\}|[CF])$", r"\1"),
    (r"\\varnothing", r"\\emptyset"),
    (r"\\overline ?\{([A-Z]{2})\}", r"\1"),
    (r"\\lbrace|\\rbrace", lambda match: "\\{" if match[0] == "\\lbrace" else "\\}"),
    (r"\\[lr]angle(?![a-zA-Z])", lambda match: "(" if match[0] == "\\langle" else ")"),
    (r"\\[lcd]?dots[bcim]?(?![a-zA-Z])", r"\\ldots"),
    (r"\\text\s*\{\s*\}|^\\text\s*\{(\d[^{}]*)\}$", r"\1"),
    # Thousands: 10,\!000, 1{,}234, 1\;234, and 3 1/2 is none.
    (r"\{,\}|,\\!\s*", ","),
    (r"(?<=\d)(?:\\[,!;: ]|~| )(?=\d{3}(?![\d/]))", ""),
    (r"(?<!\\)\{(\d{1,3}(?:,\d{3})+)\}", lambda match: match[0].replace(",", "")),
    # Other spaces; \\ begins a row of a matrix.
    (r"(\\\\)|\\[ ,;:!]|\\q?quad(?![a-zA-Z])|~|\s+", lambda match: match[1] or " "),
    (";", ","),
    (r"^\{([^{}]*,[^{}]*)\}$", r"\\{\1\\}"),
    (r"^([^:]+):([^:]+):([^:]+)$", r"(\1,\2,\3)"),
    (r"^([-+]?\d+) (\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
    (r"(\\(?:sin|cos|tan|cot|sec|csc))\s*[({]?\s*(-?[\d.]+)\s*\^\s*\{?\s*\\circ\s*\}?[)}]?",
     r"\1(\2\\pi/180)"),
]  # fmt: skip
_SPELLING = [(re.compile(pattern), replacement) for pattern, replacement in _SPELLINGS]
_LIST_BRACKET = re.compile(r"[(\[]|\\\{")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))")
_DOTS = re.compile(r"([-+]?\d*)\.(\d{0,6}?)(\d{1,6}?)\3{2,9}\s*(?:\\ldots|\.\.\.)")
_NUMBER = re.compile(
    r"([-+]?) ?(\d*)(\.\d*)?(?:(?: ?(?:\\times|\\cdot|\*) ?10 ?\^ ?|[eE])(\{ ?[-+]?\d{1,6} "
    r"?\}|[-+]?\d{1,6}))?"
)
_BASE = re.compile(r"([0-9][0-9A-Za-z.]*) ?_ ?(?:\{ ?\(?(\w+)\)? ?\}|(\d))")
_BASES = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8",
    "nine": "9", "ten": "10", "twelve": "12", "sixteen": "16",
}  # fmt: skip
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|mathit|mathsf|operatorname) ?\{([^{}]*)\}")
_LABEL = re.compile(
    r"(?:(?i:option|choice|answer):? )?(?:\(([A-J])\)(?: |(?=\d)|$)|([A-J])(?:[.):] |[.):]?$))(.*)"
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z0-9' .,:-]*")
_PERCENT = re.compile(r" ?(?:\\?%| percent|percent)$")
_UNIT = re.compile(
    r"(?:\d|\}|\\pi) ?(?:\\(?:text|mathrm) ?\{ ?([a-z]+) ?\}|([a-z]{2,}))(?: ?\^ ?\{?\d\}?)?$"
)
_UNIT_SPELLINGS = """
mm millimeter, cm centimeter, m meter, km kilometer, in inch inche, ft foot feet, yd yard, mi mile,
ms millisecond, s sec second, min minute, h hr hour, day, week, month, yr year,
mg milligram, g gram, kg kilogram, lb lbs pound, oz ounce, ml milliliter, l liter, dollar, cent
"""
_UNITS = {
    spelling: names.split()[0]
    for names in _UNIT_SPELLINGS.split(",")
    for name in names.split()
    for spelling in (name, f"{name}s")
}
_LINK = re.compile(r"\s*(?:,\s*)?(?:\\text ?\{ ?(?:and|or) ?\}|\b(?:and|or)\b)\s*")
_DEFINITION = re.compile(r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?(?:\([A-Za-z]\))? ?= ?([^=]+)")
_ONE_SIDED = re.compile(r"([A-Za-z]) ?(<|>|\\[lg]eq?(?:slant)?(?![a-z])) ?([^<>=]+)")
_OR = re.compile(r" ?\\text ?\{ ?or ?\} ?| or ")
_QUANTITY = re.compile(r"(-?[\d.,/]+) ?([a-z]{3,}(?: [a-z]{3,})*)")
_NO_UNITS = {
    "and", "dozen", "hundred", "less", "million", "billion", "more", "over", "per", "percent",
    "sqrt", "than", "thousand",
}  # fmt: skip
_NO_NAME = re.compile(r"(?:-|-?[\d.]+) ?[A-Za-z]|[A-Za-z] ?\^ ?\d")
PLUS_MINUS = "\\pm"


def spelled(text: str) -> str:
    """Return an answer in the spelling that math-verify reads."""
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _SPELLING:
        text = pattern.sub(replacement, text)
    text = text.strip().strip("*")
    if match := _DOTS.fullmatch(text):
        text = rf"{match[1]}.{match[2]}\overline{{{match[3]}}}"
    text = _REPEATING.sub(_fraction, text).rstrip(". \\")
    return (
        text
        if _LIST_BRACKET.search(text)
        else _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    )


def squeezed(text: str) -> str:
    """Return the text without the spaces that separate no digits."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def _fraction(match: re.Match[str]) -> str:
    r"""Return 0.1\overline{6} as a fraction, 16 - 1 over 90."""
    once = match[2]
    period = match[3] or match[4]
    digits = (match[1] or "0") + once
    return (
        rf"\frac{{{int(digits + period) - int(digits)}}}{{{'9' * len(period) + '0' * len(once)}}}"
    )


def decimal_value(text: str) -> Decimal | None:
    """Return the value of a decimal number, in scientific notation or not, or None."""
    match = _NUMBER.fullmatch(text)
    if match is None or not (match[2] or (match[3] or ".") != "."):
        return None
    sign, whole, decimals, exponent = match.groups()
    return Decimal(f"{sign}{whole or 0}{decimals or ''}e{(exponent or '0').strip('{} ')}")


def without_percent(text: str) -> str:
    r"""Return the text without a percent sign at its end: 25\% is written as 25, too."""
    return _PERCENT.sub("", text)


def without_unit(text: str) -> str:
    """Return the number of `8 apples`, and another text as it is."""
    match = _QUANTITY.fullmatch(plain(text))
    return match[1] if match and _NO_UNITS.isdisjoint(match[2].split()) else text


def is_equation(text: str) -> bool:
    """Return whether the text is an equation such as 2x = 10, which names no value."""
    return bool("=" in text and _NO_NAME.fullmatch(text.partition("=")[0].strip()))


def without_name(text: str) -> str:
    """Return the right side of `x = 5` or `f(x) = 5`, and another text as it is."""
    match = _DEFINITION.fullmatch(text)
    return match[1] if match else text


def plain(text: str) -> str:
    r"""Return the content of each \text{...} in its place."""
    return " ".join(_TEXT.sub(r"\1", text).split())


def label(text: str) -> tuple[str, str]:
    """Return the letter of a choice, or "", and the text after it: (D) 12 is ("D", "12")."""
    text = plain(text)
    match = _LABEL.fullmatch(text)
    if match:
        return match[1] or match[2], match[3].strip()
    return (text[-1], "") if re.fullmatch(r"(?:(?i:option|choice) )?[A-J]", text) else ("", text)


def based(text: str) -> tuple[str, str] | None:
    """Return the digits and the base of a number with a base, or None."""
    match = _BASE.fullmatch(plain(text))
    if match is None:
        return None
    base = match[2] or match[3]
    return match[1].upper().lstrip("0") or "0", _BASES.get(base, base)


def words(text: str) -> str | None:
    """Return the text in lower case if it is of words, not of variables; else None."""
    content = plain(text)
    is_text = content != text and len(content) > 1
    if not _WORDS.fullmatch(content) or not (is_text or re.search(r"[A-Za-z]{5}", content)):
        return None
    return content.lower()


def unit(text: str) -> str | None:
    """Return the unit at the end, by one name for all its spellings, or None."""
    match = _UNIT.search(text)
    return _UNITS.get(match[1] or match[2]) if match else None


def brackets(text: str, items: list[str]) -> str:
    r"""Return the kind of an answer with these parts: "set" \{1, 2\}, "tuple" (1, 2) or "interval"
    [1, 2) of several parts, "boxed" [5], "list" 1, 2, or "one". "other" is none of these: a
    relation, a matrix."""
    if re.search(r"[<>]|\\(?:[lg]eq?|ne|begin|in|cup|cap)(?![a-z])", text):
        return "other"
    opening = text.replace("\\{", "{", 1)[:1] if text[:1] != "{" else ""
    if len(items) > 1:
        return "list"
    if opening not in ("(", "[", "{") or not _is_enclosed(text):
        return "one"
    inside = text[2:-2] if opening == "{" else text[1:-1]
    if len(parts(inside)) == 1:
        return "boxed" if opening == "[" else "one"
    return {"(": "tuple" if text[-1] == ")" else "interval", "[": "interval", "{": "set"}[opening]


def _is_enclosed(text: str) -> bool:
    """Return whether the first bracket closes at the text's end."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in ")]}":
            return i == len(text) - 1
    return False


def parts(text: str) -> list[str]:
    """Return the parts of a list, between its commas, semicolons, `and` and `or` outside
    brackets."""
    parts = [""]
    depth = 0
    for character in _LINK.sub(",", text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def with_both_signs(text: str) -> str:
    r"""Return a \pm b as the list a + b, a - b."""
    return (
        f"{text.replace(PLUS_MINUS, '+')}, {text.replace(PLUS_MINUS, '-')}"
        if text.count(PLUS_MINUS) == 1
        else text
    )


def repeated(items: list[str]) -> list[str]:
    """Return the items that occur more than once, each as often as it is a repetition."""
    return sorted((Counter(items) - Counter(set(items))).elements())


def as_union(text: str) -> str:
    r"""Return x < 1 or x > 3 as the union of intervals, and another text as it is."""
    matches = [_ONE_SIDED.fullmatch(part) for part in _OR.split(text)]
    intervals = []
    for match in matches:
        if match is None or len(matches) == 1 or match[1] != (matches[0] or match)[1]:
            return text
        is_closed = match[2] not in "<>"
        below = match[2] == "<" or match[2].startswith("\\l")
        interval = (
            rf"(-\infty, {match[3]}{')]'[is_closed]}"
            if below
            else rf"{'(['[is_closed]}{match[3]}, \infty)"
        )
        intervals.append(interval)
    return r" \cup ".join(intervals)
