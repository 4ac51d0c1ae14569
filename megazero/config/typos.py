"""What an unknown key was probably meant to be.

    model.num_head      a key of the same section, misspelt      -> model.num_heads
    model.lr            a key of another section                 -> optimizer.lr
    zero.ratio          a key of a section within it             -> zero.offload.ratio
    modle.num_heads     a key of a misspelt section              -> model.num_heads

A guess is only told, never taken.
"""

from difflib import get_close_matches

from pydantic import BaseModel

from megazero.config.schema import DataSource, ElasticShape, keys, sections
from megazero.settings import Problem

# What the tables in a list of tables are.
_ITEMS: dict[str, tuple[str, type[BaseModel]]] = {
    "data.sources": ("source", DataSource),
    "elastic.shapes": ("shape", ElasticShape),
}


def unknown_key(place: str, key: str, home: str, value: object) -> tuple[Problem, list[str]]:
    """Describe a key that its section does not have.

    Args:
        place: the key as written, with its section.
        key: the last part of it.
        home: the section it stands in.
        value: what it was given.

    Returns:
        The problem, and the keys that may have been meant, as `section.key`.
    """
    meant = _meant(key, home)
    rule = "unknown key"
    if meant and all(name.rpartition(".")[0] != home for name in meant):
        rule += f" in [{home}]"
    return Problem(place, value, rule, _did_you_mean(meant) or _choices(home)), meant


def unknown_section(name: str, value: object) -> list[tuple[Problem, list[str]]]:
    """Describe a name that is no section of a run file, one problem for each key below it.

    Args:
        name: the name as written, with the section it stands in.
        value: the table or the value below it.

    Returns:
        Problems, each with the keys that may have been meant, as `section.key`.
    """
    known = sections()
    home = next(iter(get_close_matches(name, known, n=1)), None)
    choices = f"the sections are {', '.join(known)}"
    if not isinstance(value, dict):
        meant = _meant(name, None)
        return [(Problem(name, value, "a key outside any section", _did_you_mean(meant) or choices), meant)]
    if not value:
        return [(Problem(name, None, "unknown section", f"did you mean [{home}]?" if home else choices), [])]
    told = []
    for key, item in value.items():
        meant = _meant(key, home)
        hint = _did_you_mean(meant) or (_choices(home) if home else choices)
        told.append((Problem(f"{name}.{key}", item, f"unknown section [{name}]", hint), meant))
    return told


def unknown_item_key(place: str, key: str, value: object) -> Problem:
    """Describe a key that a table in a list, such as `data.sources`, does not have.

    Args:
        place: the key as written, with its section.
        key: the last part of it.
        value: what it was given.
    """
    name, item = _ITEMS[place.partition("[")[0]]
    known = item.model_fields
    close = get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the keys of a {name} are {', '.join(known)}"
    return Problem(place, value, "unknown key", hint)


def _meant(key: str, home: str | None) -> list[str]:
    """Look for a key: the same name anywhere, its own section first; a similar one there; a similar one anywhere."""
    known = keys()
    if home and key in known[home]:
        return [f"{home}.{key}"]
    same = [f"{section}.{key}" for section in known if key in known[section]]
    if same:
        return same
    if home and (close := get_close_matches(key, known[home], n=1)):
        return [f"{home}.{close[0]}"]
    everywhere = {name for names in known.values() for name in names}
    close = get_close_matches(key, sorted(everywhere), n=1)
    return [f"{section}.{name}" for name in close for section in known if name in known[section]]


def _did_you_mean(meant: list[str]) -> str:
    return f"did you mean {' or '.join(meant)}?" if meant else ""


def _choices(home: str) -> str:
    return f"the keys of [{home}] are {', '.join(sections()[home].model_fields)}"
