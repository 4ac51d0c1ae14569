"""Names and keywords that come from a user's file, checked before they reach a constructor.

    optimizer type 'Adma'                  -> did you mean Adamax or Adam?
    Adam has no parameter 'weigth_decay'   -> did you mean weight_decay?

The same guesses as for the keys of a run file (`typos.py`), for things that are named by a string and a dict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any


def unknown_name(what: str, name: str, known: Collection[str]) -> ValueError:
    """Make the error for a name that does not exist.

    Args:
        what: what is named, as in "optimizer type".
        name: the name as written.
        known: every name there is.
    """
    by_lower = {item.lower(): item for item in known}
    close = get_close_matches(name.lower(), by_lower, n=2)
    meant = f"did you mean {' or '.join(by_lower[item] for item in close)}? " if close else ""
    return ValueError(f"unknown {what} {name!r}: {meant}There are {', '.join(sorted(known))}")


def keywords_of(factory: Callable[..., Any], *, positional: int = 0) -> dict[str, Parameter]:
    """Keywords that a constructor takes, after its first `positional` arguments."""
    named = [p for p in signature(factory).parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {parameter.name: parameter for parameter in named[positional:]}


def check_keywords(what: str, keywords: Collection[str], known: dict[str, Parameter]) -> None:
    """Refuse keywords that do not exist, and the lack of those that must be given.

    Args:
        what: what takes them, as in "WarmupLR".
        keywords: the keywords as written.
        known: from `keywords_of`.

    Raises:
        ValueError: naming every such keyword, with a guess at what was meant.
    """
    told = []
    for keyword in keywords:
        if keyword not in known:
            close = get_close_matches(keyword, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            told.append(f"{what} has no parameter {keyword!r}{hint}")
    told += [
        f"{what} needs the parameter {name!r}"
        for name, parameter in known.items()
        if parameter.default is Parameter.empty and name not in keywords
    ]
    if told:
        raise ValueError(f"{'; '.join(told)}. Its parameters are {', '.join(known)}")
