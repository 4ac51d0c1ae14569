"""Sections of a run file: how values are written as TOML, and how wrong values are reported.

    training.global_batch_size = 30: must be divisible by micro_batch_size*dp=8; the nearest are 24 and 32
    [--------- key -----------]  [v]  [------------------ rule ------------------]  [-------- hint --------]

All problems of a file are reported together, so a run is started at most twice.
"""

import inspect
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

# Larger than any count of a run, and small enough that its divisors are found quickly.
LARGEST_COUNT = 2**40
LARGEST_NUMBER = 1e30  # whose products fp32 still holds

# A URL in a text: a password may hold quotes and spaces, and ends before an `@`; no port is one.  pathlib leaves one slash.
_MARK = re.compile(r"(?<=[\w+.-]{2}):/{1,3}")  # after a scheme, which is longer than the drive in C:/
_URL = re.compile(r"""\w[\w+.-]+:/{1,3}(?:[^\s/?#:@"']*:(?=\S)(?!\d+(?:[/\s"',;)]|$))[^\n]*?@)?[^\s"']*""")
# What a key of a URL's query names as secret, and user names that are tokens.
_SECRET = re.compile(
    r"([?&;#][\w.-]*(?:token|secret|passw|pwd|sig|key|credential|auth(?!or)|code)[\w.-]*=)[^&;#]+", re.IGNORECASE
)
_TOKEN = re.compile(r"(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox\w-).+|(?=.*\d)(?=.*[a-z])(?=.*[A-Z])[\w-]{20,}")

#: Takes a line for the terminal.
Log: TypeAlias = Callable[[str], None]

Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Positive = Annotated[float, Field(gt=0, le=LARGEST_NUMBER)]
PositiveOrZero = Annotated[float, Field(ge=0, le=LARGEST_NUMBER)]
Seconds = Annotated[int, Field(ge=1, le=2_000_000)]  # waits of the system count milliseconds in 31 bits
Epsilon = Annotated[float, Field(ge=1e-30, le=LARGEST_NUMBER)]  # which fp32 still holds, so that 0 / (0 + it) is 0
Fraction = Annotated[float, Field(ge=0, le=1)]
ProperFraction = Annotated[float, Field(ge=0, lt=1)]  # below 1
Text = Annotated[str, Field(min_length=1)]


def _expanded(path: str) -> str:
    if "\0" in path:
        raise PydanticCustomError("path", "be a path without a null byte")
    return os.path.expanduser(path)


def _local(path: str) -> str:
    if "://" in path:
        raise PydanticCustomError("path", "be a path of a disk, not a URL: copy what is there")
    return path


PlaceText = Annotated[Text, AfterValidator(_expanded)]  # "~/x" is a path in the home directory, as in a shell; or a URL
PathText = Annotated[PlaceText, AfterValidator(_local)]


class Section(BaseModel):
    """A table of a run file: strict types, no unknown keys, never changed.  The `#:` comment above a key documents it."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def key_texts(cls) -> dict[str, str]:
        """Return the text of each key: the `#:` comment above it in the class's source (the form that Sphinx reads)."""
        texts, comment = dict[str, str](), list[str]()
        for line in map(str.strip, inspect.getsource(cls).splitlines()):
            if line.startswith("#:"):
                comment.append(line[2:].strip())
            elif comment:
                texts[line.partition(":")[0]] = " ".join(comment)
                comment = []
        return texts


@dataclass(frozen=True)
class Spelling:
    """An annotation of a key's type: a description of its values, where the type alone is not enough."""

    text: str


@dataclass(frozen=True)
class NameIn:
    """The type of a key that names something registered: `Annotated[str, NameIn(SCHEDULES)]`."""

    registry: Iterable[str]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Let editors complete the known names and accept any other, since a script may register it."""
        return {"anyOf": [{"type": "string", "enum": list(self.registry)}, handler(schema)]}

    def _check(self, value: object) -> object:
        names = list(self.registry)
        if value not in names:
            shown = [f'"{name}"' for name in names]
            raise PydanticCustomError("name", f"be {', '.join(shown[:-1])} or {shown[-1]}", {"choices": names})
        return value


@dataclass(frozen=True)
class ActsWhere:
    """An annotation of a key's type: the key has an effect only if another key has one of certain values.

    Args:
        keys: the other key, as "section.key" or "world_size"; one of several keys, separated by spaces, is enough.
        values: these values, or a function of the run that returns them; () stands for every number above `above`, for
            true, and for every text.
        why: why the key has no effect otherwise.
        above: see `values`.
        is_noted: a set key without effect is noted, never refused: an override may switch the other key off for a while.
    """

    keys: str
    values: tuple[object, ...] | Callable[[Any], tuple[object, ...]]
    why: str
    above: int = 0
    is_noted: bool = False

    def values_in(self, run: Any) -> tuple[object, ...]:
        """Return the values.  A run decides which names exist, and what they read."""
        return self.values(run) if callable(self.values) else self.values

    def holds(self, found: object, run: Any) -> bool:
        """Whether a value of the other key is one of these values."""
        if callable(self.values) or self.values:
            return found in self.values_in(run)
        return found > self.above if isinstance(found, int | float) else bool(found)


@dataclass(frozen=True)
class Problem:
    """A problem with a configuration.

    Args:
        key: the key, as `section.key`, or the file.
        value: its value; None if there is no single value to show.
        rule: what the value must be.
        hint: what to write instead; empty if the rule says enough.
    """

    key: str
    value: object
    rule: str
    hint: str = ""

    def __str__(self) -> str:
        text = self.key
        if self.value is not None:
            try:
                shown = toml_value(hide_passwords(self.value))
            except RecursionError:
                shown = "(nested too deep to be shown)"
            text += f" = {shown if len(shown) <= 80 else shown[:80] + '…'}"
        return f"{text}: {self.rule}" + (f"; {self.hint}" if self.hint else "")


class ConfigError(ValueError):
    """A configuration cannot run; the error lists all its problems.

    Args:
        problems: one or more, in the order in which they are shown.
        source: the origin of the configuration, for the first line of the message.
    """

    def __init__(self, problems: Sequence[Problem], source: str = "the configuration") -> None:
        super().__init__(problems, source)
        self.problems, self.source = list(problems), source

    def __str__(self) -> str:
        count = len(self.problems)
        lines = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1)]
        return "\n".join([f"{count} problem{'s' if count > 1 else ''} in {self.source}:", *lines])


def file_error(path: Path | str, rule: str, hint: str = "", line: int | None = None) -> ConfigError:
    """Return the error for a whole file, or for one of its lines."""
    return ConfigError([Problem(str(path) if line is None else f"{path}:{line}", None, rule, hint)], str(path))


def without_passwords(text: str) -> str:
    """Replace the passwords of the URLs in a text, and secrets in their queries, by ***.

    s3://key:secret@bucket/run      s3://key:***@bucket/run
    https://host/run?token=secret   https://host/run?token=***
    """
    return _URL.sub(lambda url: _url_without_password(url[0]), text)


def hide_passwords(value: Any) -> Any:
    """Replace passwords and secrets in the URLs of a value, or of a whole run, by ***.

    Unlike in `without_passwords`, each string is a URL from its first to its last character.
    """
    match value:
        case str():
            return _url_without_password(value)
        case list() | tuple():
            return [hide_passwords(item) for item in value]
        case dict():
            return {key: hide_passwords(item) for key, item in value.items()}
        case BaseModel():
            return hide_passwords(value.model_dump())
        case _:
            return value


def _url_without_password(url: str) -> str:
    return _SECRET.sub(r"\1***", _without_user_info(url)) if _MARK.search(url) else url


def _without_user_info(url: str) -> str:
    """Of the URL, and of those in its query."""
    if (found := _MARK.search(url)) is None:
        return url
    scheme, mark, rest = url[: found.start()], found[0], url[found.end() :]
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    has_port = scheme.endswith(("http", "https")) and re.search(r":\d+$", host)
    if "@" in host:
        user_info = host.rpartition("@")[0]
    elif ":" in host and "@" in rest and not has_port:  # the password has a slash
        user_info = rest.partition("@")[0]
    else:
        return scheme + mark + _without_user_info(rest)
    user, colon, _ = user_info.partition(":")
    shown = "***" if _TOKEN.fullmatch(user) else user
    return scheme + mark + shown + (":***" if colon else "") + _without_user_info(rest[len(user_info) :])


def read_text(path: Path) -> str:
    """Read a configuration file.  Raises: ConfigError: the file cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors of Windows begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise file_error(path, f"is not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise file_error(path, f"cannot be read: {error.strerror}") from None


def write_text(path: Path, text: str) -> None:
    """Write a temporary file and rename it to `path`, so that no reader sees half a file.  Makes the folder if needed.

    Raises: OSError: the file cannot be written; the error names `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{platform.node()}-{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def nearest_multiples(value: int, step: int) -> list[int]:
    """Return the positive multiples of `step` just below and just above a value that is no multiple."""
    below = value // step * step
    return [multiple for multiple in (below, below + step) if multiple > 0]


def nearest_of(value: int, candidates: Iterable[int]) -> list[int]:
    """Return the candidate just below a value and the candidate just above it, as far as they exist."""
    others = sorted(set(candidates) - {value})
    return [c for c in others if c < value][-1:] + [c for c in others if c > value][:1]


def nearest_text(values: Sequence[int], name: str = "") -> str:
    """Describe the nearest values: `the nearest tp are 2 and 4`."""
    subject = f"the nearest {name}".rstrip()
    return f"{subject} {'is' if len(values) == 1 else 'are'} {' and '.join(map(str, values))}"


def counted(number: float, what: str) -> str:
    """Return a number with its noun: `1 layer`, `4 micro-batches`."""
    return f"{number if isinstance(number, int) else f'{number:g}'} {what}" + (
        "" if number == 1 else "es" if what.endswith("ch") else "s"
    )


def listed(texts: Sequence[str], most: int = 8, separator: str = ", ", total: int | None = None) -> str:
    """Join the first texts, and count the others: `rank 0, rank 1, and 6 more`.

    `total`: of how many these texts are the first ones; None if they are all.
    """
    left_out = (len(texts) if total is None else total) - len(texts[:most])
    return separator.join([*texts[:most], *([f"and {left_out:,} more"] if left_out else [])])


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, in ascending order."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def toml_value(value: object) -> str:
    """Format a number, string, date, list, dict or section as TOML, which reads back as an equal value.

    Keys of a table whose value is None are left out.
    """
    match value:
        case bool():  # before int: True is an int in Python
            return "true" if value else "false"
        case str():
            # JSON strings are TOML strings, but for one control character that JSON lets through.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case BaseModel():
            return toml_value(value.model_dump())
        case dict():
            value = {key: item for key, item in value.items() if item is not None}
            names = [key if re.fullmatch("[A-Za-z0-9_-]+", key) else toml_value(key) for key in value]
            items = zip(names, map(toml_value, value.values()), strict=True)
            return "{ " + ", ".join(f"{name} = {item}" for name, item in items) + " }"
        case _:
            return str(value)
