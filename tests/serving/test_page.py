"""The service's page: complete in itself, without data, closed to everything else."""

import re
from base64 import b64encode
from hashlib import sha256

from raytrec.serving.page import make_page


def test_it_refers_to_nothing_outside():
    html, _ = make_page()
    assert not re.search(r"https?://", html)
    assert re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]*)""", html) == ["data:,"]
    assert "@import" not in html and "url(" not in html and "//cdn" not in html


def test_a_browser_runs_its_script_and_style_alone():
    html, headers = make_page()
    policy = dict(each.split(" ", 1) for each in headers["Content-Security-Policy"].split("; "))
    for tag, what in (("script", "script-src"), ("style", "style-src")):
        ((text),) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert policy.pop(what) == f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    assert policy == {
        "default-src": "'none'", "img-src": "data:", "connect-src": "'self'",
        "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip
    assert "style=" not in html and not re.search(r"\son[a-z]+=", html)


def test_what_comes_from_data_is_never_html():
    html, _ = make_page()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", html)


def test_the_token_goes_into_one_header_alone():
    html, _ = make_page()
    (line,) = re.findall(r".*\$\{token\}.*", html)
    assert "Authorization: `Bearer ${token}`" in line and "location" not in html
