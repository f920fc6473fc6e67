"""No output of a run contains a part of a password or another secret."""

import io
import json
import pickle
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from small import SCHEMA

from raytrec.common.errors import ConfigError, RunError
from raytrec.common.redaction import find_hidden_keys, hide, hide_all, hide_yaml
from raytrec.config.run_config import load_config

SEED = "Zq9x7Kw"  # part of every secret, and of no other text
ANY_TEXT = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_characters='<>" \x85\xa0'), max_size=12)
PLAIN_TEXT = st.text("abcdefgh0123456789_-.~%!$*+", max_size=12)
HOST = st.sampled_from(["host", "host:5000/x", "10.0.0.1/a/b?region=eu", "bucket/part-0.parquet", "db.example.com"])
SCHEME = st.sampled_from(["http", "https", "s3", "gs", "postgresql", "mysql+pymysql", "git+https", "redis"])
PARAMETERS = [
    "sig", "X-Amz-Signature", "x-amz-credential", "X-Amz-Security-Token", "X%2DAmz%2DSignature", "pwd",
    "password", "secret_key", "access_key", "private_key", "AWSAccessKeyId", "apiKey", "api-key", "token",
    "auth", "passphrase",
]  # fmt: skip
NAMES = (*PARAMETERS[5:-3], "DB_PWD", "clientSecret", "credentials", "AZURE_STORAGE_SAS", "jwt")


@st.composite
def draw_addresses(draw):
    """Draw an address with a password, a token as user name, or a signed parameter."""
    scheme, host = draw(SCHEME), draw(HOST)
    kind = draw(st.sampled_from(["password", "token", "token and nothing", "parameter", "fragment"]))
    if kind == "password":
        return f"{scheme}://{draw(PLAIN_TEXT)}:{draw(ANY_TEXT)}{SEED}{draw(ANY_TEXT)}@{host}"
    if kind == "token":
        return f"{scheme}://{draw(PLAIN_TEXT)}{SEED}{draw(PLAIN_TEXT)}@{host}"
    if kind == "token and nothing":
        nothing = draw(st.sampled_from(["", "x-oauth-basic"]))
        return f"{scheme}://{draw(PLAIN_TEXT)}{SEED}{draw(PLAIN_TEXT)}:{nothing}@{host}"
    mark = "#" if kind == "fragment" else "&" if "?" in host else "?"
    name, before = draw(st.sampled_from(PARAMETERS)), draw(st.sampled_from(["", "a=1&"]))
    value = draw(st.text("abc123%+/=@:;,.#?-_", max_size=9))
    return f"{scheme}://{host}{mark}{before}{name}={value}{SEED}&b=2"


SECRETS = st.one_of(
    draw_addresses(),
    st.builds(lambda n, v: f"{n}={v}{SEED}", st.sampled_from(NAMES), st.text("abc123.-_/+", max_size=5)),
    st.builds(lambda n: f"{{'{n}': '{SEED} and more', 'x': 1}}", st.sampled_from(NAMES)),
    st.builds(lambda n: json.dumps({n: f"{SEED} x"}), st.sampled_from(NAMES)),
    st.just(f"-----BEGIN PRIVATE KEY-----\nabc{SEED}\n-----END PRIVATE KEY-----"),
    st.just(f"Authorization: Bearer {SEED}abc.def"),
    st.builds(lambda n, v: f"--{n} {v}{SEED}", st.sampled_from(NAMES), st.text("abc123._/+", max_size=5)),
    st.builds(lambda n: f"{n}: {SEED}-1", st.sampled_from(NAMES)),
)


@given(
    secret=SECRETS,
    before=st.sampled_from(["", "cannot open ", "['", "(got "]),
    after=st.sampled_from(["", ": no", "']"]),
)
@settings(max_examples=200, deadline=None)
def test_secrets_in_texts_are_hidden(secret, before, after):
    text = f"{before}{secret}{after}"
    assert SEED not in hide(text), hide(text)
    assert hide(hide(text)) == hide(text)
    error = pickle.loads(pickle.dumps(RunError(text, where=text, expected=text, do=text)))
    assert SEED not in str(error) + repr(error.parts) + str(error._render_traceback_())


@given(address=draw_addresses(), name=st.sampled_from(NAMES))
@settings(max_examples=60, deadline=None)
def test_secrets_in_settings_are_hidden(address, name):
    values = {"uri": address, "list": [address, {name: SEED}], "tags": {name: f"a {SEED}"}}
    values[name] = [SEED, {"x": SEED}]
    assert SEED not in str(hide_all(values))
    assert SEED not in hide_yaml(yaml.safe_dump(values))
    assert {"uri", "list", f"tags.{name}"} <= set(find_hidden_keys(hide_all(values)))
    assert SEED not in str(hide_all(("a", address))) and hide_all(hide_all(values)) == hide_all(values)


@given(address=draw_addresses())
@settings(max_examples=15, deadline=None)
def test_secrets_are_hidden_in_every_output(address, tmp_path_factory):
    """Console, MLflow, dashboard and tracebacks of a run whose settings contain secrets."""
    from ray.train.v2._internal.state.schema import _to_json_serializable_value

    from raytrec.client.jobs import _check_no_secrets
    from raytrec.driver.console import Result, RunConsole, print_summary
    from raytrec.tracking.delivery import MAX_TEXTS_PER_CALL, parameters, split_texts
    from raytrec.worker.context import WorkerTask

    tags = {"team": "ads", "api_key": SEED, "see": address}
    values = {"data": {"train": "d/train", "valid": address}, "tracking": {"uri": address, "tags": tags}}
    config = load_config(values | {"model": {"name": "m:M", "options": {"private_key": SEED, "at": address}}})
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        with RunConsole("run") as console:
            console.note(address)
            console.warn(f"failed: {address}")
            console.phase(address)
            console.event("failed", cause=address)
        print_summary(Result({"name": "run"}, Path(), [f"MLflow       {address}"]))
    recorded = [*split_texts(parameters(config), 6000), *split_texts(hide_all(config.tracking.tags), 8000)]
    assert all(len(part) <= MAX_TEXTS_PER_CALL for part in recorded)
    shown = _to_json_serializable_value(WorkerTask(config, SCHEMA, {}, None, address))
    try:
        raise RunError(address)
    except RunError as error:
        told = "".join(traceback.format_exception(error))
    for text in (out.getvalue(), str(recorded), str(shown), repr(config), told):
        assert SEED not in text, text
    with pytest.raises(ConfigError) as refused:
        _check_no_secrets(f"python -m raytrec evaluate run --data {address}", {})
    assert SEED not in str(refused.value)


SECRET_TEXTS = [
    f"mysql --password {SEED} -h host",
    f"docker login -u me -p {SEED} registry",
    f"Command ['mysql', '--password', '{SEED}'] failed",
    f"login failed (user: me, password: {SEED})",
    f"api_key: '{SEED} and more', region: eu",
    f"Cookie: a={SEED}; b={SEED}",
    f"npm_{SEED}{'a1' * 15}",
    f"pypi-AgEIcHlwaS5vcmc{SEED}{'a-1' * 10}",
    f"ya29.a0AfH6_{SEED}-x",
]


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_secrets_in_commands_and_tokens_are_hidden(text):
    assert SEED not in hide(text) and hide(hide(text)) == hide(text)


def test_session_tags_and_numeric_tokens_are_hidden():
    tags = {"cookie": SEED, "bearer": SEED, "session": SEED, "token": 123_456_789, "team": "ads"}
    tags["client_secret"] = 987_654_321
    assert hide_all(tags) == {name: "***" for name in tags if name != "team"} | {"team": "ads"}
    assert hide("token=123456789") == "token=***"


NO_SECRETS = """\
mail me@there.org: now
tokens=5
a:b@c
key=5
author=me
tokenizer=bert
compass=north
credentials_file=/home/me/key.json
set warm_start.tables.query_token=new
set RAY_AUTH_TOKEN_PATH=FILE, or RAY_AUTH_MODE=disabled
http://host:5000
http://h/#/experiments/1
s3://bucket/a@b
s3://b/date=2026-01-01/x?region=eu
sqlite:////a/b.db
abfss://box@account.dfs.core.windows.net/x
s3://b/session=abc/part-0.parquet
ssh -p 2222 host
docker run -p 80:8080 image
tokens=500000, max_token=100
token_ids: no such column
raytrec check config.yaml --password-file x"""


def test_values_without_secrets_are_unchanged():
    for text in NO_SECRETS.split("\n"):
        assert hide(text) == text
    values = {
        "num_tokens": 5,
        "warm_start": {"tables": {"query_token": "new"}},
        "plan": {"tables": {"pass": {"dim": "a"}}},
        "model": {"eos_token": 5, "relations": {"session": ["click"]}},
        "checks": {"custom": {"mine.token:Check": "warn"}},
    }
    assert hide_all(values) == values
    kept = {"pwd": None, "secret": True}
    assert hide_all({"password": 12345} | kept) == {"password": "***"} | kept


@pytest.mark.slow
def test_hiding_secrets_in_long_text_is_fast():
    pieces = ["a", "a=", "://", "a:b@", "'a': ", "?a=b", " ", "eyJaaaaaaaaaaa.", "-p ", "password: "]
    for piece in (*pieces, "-----BEGIN PRIVATE KEY-----"):
        hide(piece * (300_000 // len(piece)))
        hide("http://" + piece * (300_000 // len(piece)))


def test_placeholder_of_a_token_stays_visible():
    assert hide("expected: Authorization: Bearer TOKEN") == "expected: Authorization: Bearer TOKEN"
    assert "TOKENabc" not in hide("Authorization: Bearer TOKENabc")


def test_secrets_in_comments_of_yaml_are_dropped():
    assert hide_yaml("a: 1 # password=abc\n") == "a: 1\n"
    assert hide_yaml("a: 1 # the first\n") == "a: 1 # the first\n"
