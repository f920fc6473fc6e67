"""Redact secrets in addresses, settings and texts.

No dependency redacts arbitrary text. urllib.parse, urllib3 and SQLAlchemy parse addresses, but they split passwords
that contain @, /, ? or #, so part of such a password would remain visible.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote_plus

import yaml

from raytrec.common.reading import UnreadableError, parse_yaml

HIDDEN = "***"
# Quantifiers that could otherwise backtrack are possessive, because text may be long and hostile.
ADDRESS = re.compile(r"([A-Za-z0-9+.-]*+)://([^\s<>\"]*+)")
WHOLE_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*+)://(.*+)", re.DOTALL)
PARAMETER = re.compile(r"[?&;#]([^=&;#?/\s]{1,200}+)=")
PARAMETER_VALUE = re.compile(r"[^&\s]*+")
SETTING = re.compile(r"(?<![\w.%-])([\w.%-]++)(\s*+=\s*+|['\"]\s*+:\s*+)('[^']*+'|\"[^\"]*+\"|[^\s&,;'\"<>(){}\[\]]++)")
FIELD = re.compile(
    # TOKEN is a placeholder in advice.
    r"(?<![\w.%-])([\w.%-]++)(:[ \t]++)(?!(?:Bearer )?TOKEN(?![\w.~+/=-]))"
    r"('[^'\n]*+'|\"[^\"\n]*+\"|(?:(?:Bearer|Basic|Token)[ \t]++)?+\S++)",
    re.IGNORECASE,
)
COOKIE = re.compile(r"(\bcookie:[ \t]*+)[^\n'\"]++", re.IGNORECASE)
# --password X, -p X, and the same as items of a list: '--password', 'X'.
OPTION = re.compile(
    r"(?<![\w.-])(--?[A-Za-z][\w-]*+)([ \t]++|['\"][ \t]*+,[ \t]*+['\"])"
    r"('[^'\n]*+'|\"[^\"\n]*+\"|[^\s'\"-][^\s'\"]*+)"
)
PORT = re.compile(r"\d{1,5}(?::\d{1,5})?")  # value of -p that is not a password
HEADER = re.compile(r"(\b(?:Bearer|Basic|Token)\s++)[\w.~+/=-]{8,}+", re.IGNORECASE)
PEM = re.compile(
    r"-----BEGIN [A-Z ]{0,40}?PRIVATE KEY-----(?:.*?-----END [A-Z ]{0,40}?PRIVATE KEY-----|.*+)", re.DOTALL
)
SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:gh[opusr]_\w{10,}+|github_pat_\w{10,}+|glpat-[\w-]{10,}+|xox[abeprs]-[\w-]{10,}+"
    r"|sk-[\w-]{20,}+|(?:hf|npm)_[A-Za-z0-9]{20,}+|pypi-[\w-]{32,}+|ya29\.[\w-]{10,}+|dapi[0-9a-f]{32}|AIza[\w-]{35}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|eyJ[\w-]{10,}+\.[\w-]++\.[\w-]*+)"
)
# Parts of names, and whole words in names, that denote a secret.
PASSWORD = r"passw(?:or)?d|passphrase|pwd|(?:private|api|access|account|shared|secret|encryption)[_-]?key"
SECRET_NAME = re.compile(rf"{PASSWORD}|secret|token(?!i[sz])|credential|signature", re.IGNORECASE)
PASSWORD_NAME = re.compile(PASSWORD, re.IGNORECASE)
SECRET_WORDS = frozenset(["pass", "pw", "sig", "sas", "jwt", "auth", "oauth", "authorization", "cookie", "bearer"])
SECRET_KEYS = frozenset(["session"])  # further secret keys of mappings; in text, session=3 may be a partition
MAX_TOKEN_COUNT = 99_999  # largest number of a key `token` or `secret` that is treated as a count
PLACE_WORDS = frozenset(["path", "file", "dir", "mode"])  # last words of names that denote a secret's location
WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")
CONTAINER_SCHEMES = ("abfs", "abfss", "wasb", "wasbs")  # schemes whose URIs begin with CONTAINER@ACCOUNT
PLACEHOLDER_PASSWORDS = ("", "x-oauth-basic")  # passwords in addresses whose user is a token
MAX_USER_NAME_LENGTH = 20  # characters; longer names are treated as tokens
USER_KEYED_SETTINGS = ("tables", "sparse", "relations", "custom")  # settings whose keys are chosen by the user
PATH_CHARACTER = r"[\w.@+~%#-]"
PRIVATE_PATTERNS = {  # replacement by `anonymize` → pattern
    "STORAGE": r"\b[\w+]+://\S+",
    # Names of shared libraries and /dev/shm are not private.
    "PATH": rf"(?<![\w.*])(?!/dev/shm(?!/|{PATH_CHARACTER}))~?(?:(?:/{PATH_CHARACTER}+)+"
    rf"(?=/[\w-]+\.so[\d.]*(?!/|{PATH_CHARACTER}))|(?:/{PATH_CHARACTER}+)+/?)",
    "ADDRESS": r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
    r"|(?<![\w:])\[?(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?:%\w+)?\]?(?::\d+)?(?![\w:])"
    r"|\b[\w-]+(?:\.[\w-]+)*:\d{2,5}\b",
}
HIDDEN_TRACE = re.compile(r"//\*\*\*|:\*\*\*@|=\*\*\*(&|$)|^\*\*\*$")


def hide(text: str) -> str:
    """Replace passwords, tokens, keys and signatures in a text with ***.

    If an address contains a colon before its first @, /, ? or #, the text before its last @ is treated as user and
    password.

    Example:
        >>> hide("s3://me:p@ss/w@bucket?X-Amz-Signature=abc&region=eu")
        's3://me:***@bucket?X-Amz-Signature=***&region=eu'
        >>> hide("git+https://ghp_0123456789@github.com, pwd=abc")
        'git+https://***@github.com, pwd=***'
    """
    if whole := WHOLE_ADDRESS.fullmatch(text):  # a single address, which may contain any character
        text = _redact_address(whole) if "\n" not in text else text
    if "-----BEGIN" in text:
        text = PEM.sub(HIDDEN, text)
    if "://" in text:
        text = ADDRESS.sub(_redact_address, text)
    text = OPTION.sub(
        _redact_option, FIELD.sub(_redact_field, COOKIE.sub(rf"\1{HIDDEN}", SETTING.sub(_redact_setting, text)))
    )
    return SHAPES.sub(HIDDEN, HEADER.sub(rf"\1{HIDDEN}", text))


def hide_all(value: Any) -> Any:
    """Apply `hide` to all text in nested lists and mappings, and replace values of keys that denote a secret by ***.

    The keys directly in `tables`, `sparse`, `relations` and `custom` are chosen by the user, and denote no secret.
    A number is replaced only if its key denotes a password or an access key, or if the number exceeds MAX_TOKEN_COUNT
    and its key ends with `token` or `secret`.

    Example:
        >>> hide_all({"uri": "http://me:pass@host", "tags": {"api_key": "abc", "team": "ads"}})
        {'uri': 'http://me:***@host', 'tags': {'api_key': '***', 'team': 'ads'}}
    """
    return _redact_value(value, secret=False, password=False, judged=True)


def anonymize(text: str, names: Mapping[str, str]) -> str:
    """Replace storage URIs, paths and network addresses in a text with STORAGE, PATH and ADDRESS.

    The names of hosts and users are also replaced.

    Args:
        text: Text to anonymize.
        names: Name of a host or user → its replacement; at least one, and none empty.
    """
    longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))  # "vm (10.0.0.1) #2"
    places = (f"(?P<{place}>{pattern})" for place, pattern in PRIVATE_PATTERNS.items())
    private = re.compile("|".join([*places, rf"(?<![\w-])(?:{longest_first})(?![\w-])"]))
    return private.sub(lambda found: found.lastgroup or names[found[0]], text)


def is_secret(name: str) -> bool:
    """Return True if the name of a setting or parameter denotes a secret, such as api_key, rather than its location."""
    words = [word.lower() for word in WORD.findall(name[:200])]
    if words and words[-1] in PLACE_WORDS:
        return False
    return bool(SECRET_NAME.search(name)) or not SECRET_WORDS.isdisjoint(words)


def hide_yaml(text: str) -> str:
    """Apply `hide_all` to YAML, and `hide` to text that is not YAML.

    YAML without secrets is returned unchanged; other YAML is formatted again, without comments.
    """
    try:
        values = parse_yaml(text)
    except UnreadableError:
        return hide(text)
    hidden, comments_are_safe = hide_all(values), "#" not in text or hide(text) == text
    return (
        text if hidden == values and comments_are_safe else yaml.safe_dump(hidden, sort_keys=False, allow_unicode=True)
    )


def find_hidden_keys(value: Any, key: str = "") -> list[str]:
    """Return the keys of nested settings, such as `tracking.uri`, in whose values a secret has been replaced by ***.

    Args:
        value: Settings as nested dicts, lists and values.
        key: Key of `value` itself, with which the results begin.
    """
    if isinstance(value, dict):
        return [found for k, each in value.items() for found in find_hidden_keys(each, f"{key}.{k}".strip("."))]
    if isinstance(value, list | tuple):
        return list(dict.fromkeys(found for each in value for found in find_hidden_keys(each, key)))
    return [key] if isinstance(value, str) and HIDDEN_TRACE.search(value) else []


def _redact_value(value: Any, *, secret: bool, password: bool, judged: bool) -> Any:
    """Return the value of a setting without secrets.

    Args:
        value: Value to redact.
        secret: True to hide text and bytes, because an enclosing key denotes a secret.
        password: True to also hide numbers, because an enclosing key denotes a password or the number is a token.
        judged: True if the keys of the value are names of settings, False if they are names chosen by the user.
    """
    if isinstance(value, str):
        return HIDDEN if secret and value else hide(value)
    if isinstance(value, list | tuple):
        found = (_redact_value(each, secret=secret, password=password, judged=judged) for each in value)
        return type(value)(found)
    if isinstance(value, dict):
        return {
            key: _redact_value(
                each,
                secret=secret or (judged and (is_secret(str(key)) or str(key).lower() in SECRET_KEYS)),
                password=password or (judged and not _is_count(str(key), each)),
                judged=str(key) not in USER_KEYED_SETTINGS,
            )
            for key, each in value.items()
        }
    if password and isinstance(value, int | float) and not isinstance(value, bool):
        return HIDDEN
    return HIDDEN if secret and isinstance(value, bytes) else value


def _redact_address(match: re.Match) -> str:
    scheme, location = match.groups()
    authority = re.match(r"[^/?#]*+", location).group()
    user, colon, _ = authority.partition(":")
    at = location.rfind("@") if colon and "@" not in user else authority.rfind("@")
    for begin, end in _find_secret_values(location):
        if begin <= at < end:  # a secret that contains @
            return f"{scheme}://{HIDDEN}{_redact_parameters(location[end:])}"
    if at >= 0:
        redacted_user = _redact_user(scheme, location[:at])
        return f"{scheme}://{redacted_user}@{_redact_parameters(location[at + 1 :])}"
    return f"{scheme}://{_redact_parameters(location)}"


def _redact_user(scheme: str, info: str) -> str:
    user, colon, password = info.partition(":")
    if not colon:
        return info if scheme.lower() in CONTAINER_SCHEMES and len(info) < 64 else HIDDEN
    is_name = len(user) < MAX_USER_NAME_LENGTH and password not in PLACEHOLDER_PASSWORDS and not SHAPES.search(user)
    return f"{user if is_name else HIDDEN}:{HIDDEN}"


def _redact_parameters(text: str) -> str:
    pieces, at = [], 0
    for begin, end in _find_secret_values(text):
        pieces += [text[at:begin], HIDDEN]
        at = end
    return "".join([*pieces, text[at:]])


def _find_secret_values(text: str) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of the value of each secret parameter; a value may contain ?, ; or #."""
    end = 0
    for match in PARAMETER.finditer(text):
        name = unquote_plus(match[1])
        if match.start() >= end and (is_secret(name) or "key" in name.lower()):
            end = PARAMETER_VALUE.match(text, match.end()).end()
            yield match.end(), end


def _redact_setting(match: re.Match) -> str:
    name, equals, value = match.groups()
    plain = unquote_plus(name)
    if any(part in USER_KEYED_SETTINGS for part in plain.split(".")[:-1]) or not is_secret(plain):
        return match.group()
    bare = value.strip("'\"")
    if not bare or bare in ("None", "null", "true", "false", "True", "False"):
        return match.group()
    if re.fullmatch(r"[\d.]+", bare) and _is_count(plain, float(bare.replace(".", ""))):
        return match.group()
    quote = value[0] if value[0] in "'\"" else ""
    return f"{name}{equals}{quote}{HIDDEN}{quote}"


def _redact_field(match: re.Match) -> str:
    """Redact "name: value" as a setting, unless the value is a lower-case word and the name denotes no password."""
    is_sentence = not PASSWORD_NAME.search(match[1]) and re.fullmatch(r"[a-z]+[.,;:]?", match[3])
    return match.group() if is_sentence else _redact_setting(match)


def _redact_option(match: re.Match) -> str:
    name, separator, value = match.groups()
    if name == "-p":
        return match.group() if PORT.fullmatch(value) else f"{name}{separator}{HIDDEN}"
    return f"{name}{separator}{HIDDEN}" if is_secret(name) else match.group()


def _is_count(name: str, number: Any) -> bool:
    """Return True unless a setting denotes a password or key, or a token or secret above MAX_TOKEN_COUNT."""
    if PASSWORD_NAME.search(name):
        return False
    is_token = name.lower().endswith(("token", "secret")) and isinstance(number, int | float)
    return not (is_token and abs(number) > MAX_TOKEN_COUNT)
