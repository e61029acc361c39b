"""Texts as they may leave the process: without secrets, and not endless. All that writes settings,
commands, URLs or errors uses these functions.
"""

from __future__ import annotations

import re
from collections.abc import Collection

HIDDEN = "***"
"""Replaces a secret in texts."""
_NAME = r"(?:token|key|secret|password|passwd|signature|credentials?|authorization)"
SECRET = re.compile(rf"{_NAME}$", re.IGNORECASE)
"""The name of a keyword argument, or of a parameter of a URL, that holds a secret."""
_WITHIN = re.compile(rf"{_NAME}[\"']?\s*:", re.IGNORECASE)
"""A secret's name in an override whose value is a mapping."""
_USER = re.compile(r"(?<=://)[^/?#\s\"]*@")
_PARAMETER = re.compile(rf"([?&][^?=&#\s\"]*{_NAME}=)[^&#\s\"']+", re.IGNORECASE)
_HIDDEN_IN_URL = re.compile(
    rf"://{re.escape(HIDDEN)}@|[?&][^?=&#]*{_NAME}={re.escape(HIDDEN)}", re.IGNORECASE
)
MOST_CHARACTERS = 4000
"""Length of an error's text: the ranks exchange it, and torch's store takes at most 8 kB."""
_LENGTH_STATED = 40


def any_name(key: str) -> str:
    """Return the setting's key with NAME in place of the name of its section, if it has one."""
    return re.sub(r"(?<=_models\.)\w+", "NAME", key)


def masked(text: str) -> str:
    """Return the text with HIDDEN for the user and password of each URL in it, and for its
    parameters with the name of a secret."""
    if "://" not in text:
        return text
    return _PARAMETER.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))


def masked_argument(argument: str, settings: Collection[str]) -> str:
    """Return an argument of a command, masked; the whole value of an override whose key ends as a
    secret's, or whose value is a mapping with such a key, is hidden. settings: the keys of the
    schema, which are no secrets."""
    key, equals, value = argument.partition("=")
    is_secret = SECRET.search(key) is not None and any_name(key) not in settings
    return (
        f"{key}={HIDDEN}" if equals and (is_secret or _WITHIN.search(value)) else masked(argument)
    )


def is_hidden(text: str) -> bool:
    """Return whether the text is what a secret, or a URL with one, was recorded as."""
    return text == HIDDEN or _HIDDEN_IN_URL.search(text) is not None


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return the text in one line, cut, with escapes for characters that a terminal would obey or
    cannot show."""
    words = " ".join(cut(text, most).split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def cut(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return the text, or of a longer one the beginning and its length: at most `most`
    characters."""
    return (
        text
        if len(text) <= most
        else f"{text[: most - _LENGTH_STATED]}... ({len(text):,} characters)"
    )
